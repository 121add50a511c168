"""One pass over host memory for an optimizer's step, compiled by numba: gradient in, weight and state out.

    gradient -> fp32 -> scale, clip -> `_update`: weight, moments -> codecs -> memory, and a bf16 copy of the weight

`kernel_of` compiles a loop for each `Kind` that it meets, and keeps it on disk. `step_shares`, which is compiled once,
has it step all weights of a unit on several threads: in one call, because each time that it takes or gives back
Python's lock, the thread that launches kernels may have to wait.

[Note: bits] `_update` has the bits of torch's fused CPU kernels. `fma` stands where their compiler contracts; the
elements that are left over at the end of a tensor (`tail`) are compiled another way. `tests/optim` tries it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, prange, typeof, types

from sp_lightning.optim.codecs import (
    F32,
    SOURCES,
    U32,
    bits_of,
    float_of,
    fma,
    jit,
    key_at,
    load,
    load_moment,
    load_weight,
    pack,
    read,
    scaled,
    space,
    store,
    store_weight,
    write,
)
from sp_lightning.optim.layout import GROUP, LANES
from sp_lightning.optim.rules import ADAM, LION, NESTEROV, NO_SCALING, Kind, Memory, Rule, Scaling

_LOG = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------------- rules of updates


@jit
def _update(kind: Kind, rule: Rule, p: Any, g: Any, m: Any, v: Any, tail: bool) -> Any:
    """Return a weight and its two moments after a step, from those before it and the gradient; all in fp32.

    The bits are promised unless the second moment is kept in codes.
    """
    if kind.is_penalized:
        g = fma(p, rule.penalty, g)
    if kind.update == ADAM:
        return _adam(rule, p, g, m, v, tail and kind.second > 1, kind.second == 1)
    if kind.update == LION:
        return _lion(rule, p, g, m, v)
    if kind.first > 0:
        m = _momentum(rule, g, m, tail)
        g = fma(m, rule.first_decay, g) if kind.update == NESTEROV else m
    return fma(g, -rule.lr, p), m, v


@jit
def _momentum(rule: Rule, g: Any, m: Any, tail: bool) -> Any:
    if tail:
        return fma(m, rule.first_decay, g * rule.first_rate)
    return fma(g, rule.first_rate, m * rule.first_decay)


@jit
def _adam(rule: Rule, p: Any, g: Any, m: Any, v: Any, tail: bool, is_near: bool) -> Any:
    from_m = bits_of(rule.first_rate) < bits_of(F32(0.5))  # as integers: it stays in a loop
    m = fma(rule.first_rate if from_m else rule.first_rate - F32(1), g - m, m if from_m else g)
    if tail:
        v = fma(v, rule.second_decay, rule.second_rate * g * g)
    else:
        v = fma(rule.second_rate * g, g, v * rule.second_decay)
    if is_near:  # to divide takes long
        divisor = fma(np.sqrt(v), F32(1) / rule.correction, rule.eps)
        return fma(p, rule.decay, -rule.lr * m / divisor), m, v
    return p * rule.decay - rule.lr * m / (np.sqrt(v) / rule.correction + rule.eps), m, v


@jit
def _lion(rule: Rule, p: Any, g: Any, m: Any, v: Any) -> Any:
    direction = m * rule.first_decay + g * rule.first_rate
    step = rule.lr if direction > 0 else (-rule.lr if direction < 0 else direction)  # NaN stays NaN
    return p * rule.decay - step, m * rule.second_decay + g * rule.second_rate, v


# ----------------------------------------------------------------------------------------------------------- the pass


@jit
def _part(kind: Kind, row: Any, start: Any) -> Any:
    """Return the memory from an element on, at which a group begins if there are groups."""
    group = start // GROUP
    return Memory(
        row[0] + kind.weight * start, row[1] + kind.low * start, row[2] + kind.gradient * start,
        row[3] + kind.first * start, row[4] + kind.second * start, row[5] + kind.copy * start,
        row[6] + 4 * group, row[7] + 4 * group,
    )  # fmt: skip


@jit
def _step_block(
    kind: Kind, rule: Rule, scaling: Scaling, memory: Memory, size: Any, tail: Any, seed: Any, start: Any
) -> None:
    has_sign = kind.second > 1  # to keep a tie in, see [Note: ties]
    keys = key_at(seed, start), key_at(seed ^ 0x55555555, start), key_at(seed ^ 0x33333333, start)
    staged = space(), space()
    m_scale = read(memory.first_scale, 0, F32(0)) if kind.first == 1 else F32(0)
    v_scale = read(memory.second_scale, 0, F32(0)) if kind.second == 1 else F32(0)
    for i in range(size):
        g = load(memory.gradient, kind.gradient, i)
        g = scaled(g, scaling, kind.operations, kind.weight == 2 and kind.gradient == 2)
        m = load_moment(memory.first, kind.first, m_scale, i, False)
        v = load_moment(memory.second, kind.second, v_scale, i, True)
        was_up = U32(bits_of(v) >> U32(31)) if has_sign else U32(1)
        p = load_weight(kind, memory, i, was_up)
        p, m, v = _update(kind, rule, p, g, m, abs(v) if has_sign else v, tail)
        up = store_weight(kind, memory, i, p, has_sign, keys[0])
        if kind.copy > 0:
            store(memory.copy, kind.copy, i, p, False, keys[0])
        # what is to be packed is staged, as its scale is known when the whole group is
        if kind.first == 1:
            write(staged[0], i, m)
        elif kind.first > 0:
            # at random, or averages would stand still
            store(memory.first, kind.first, i, m, kind.is_random, keys[1])
        if kind.second == 1:
            write(staged[1], i, np.sqrt(v))  # which the update has computed already
        elif kind.second > 0:
            v = float_of(bits_of(v) | U32(up << U32(31)))
            store(memory.second, kind.second, i, v, kind.is_random, keys[2])
    if kind.first == 1:
        pack(kind, memory, staged, size, keys[2])


_SIGNATURE = types.void(
    typeof(Rule(ADAM, F32(0))), typeof(NO_SCALING), types.int64[::1], types.int64, types.int64, types.int64
)


@cache
def kernel_of(kind: Kind) -> Any:
    """Return the loop of a kind, which steps a range of a weight."""
    sources = SOURCES  # the constants of a loop are part of its name on disk

    def step(rule: Rule, scaling: Scaling, row: Any, begin: Any, end: Any, seed: Any) -> None:
        """Step a range in blocks: groups of codes, or whole vectors and the elements that are left over."""
        _ = sources
        tail = end - (end - begin) % (2 * LANES if kind.weight == 2 and kind.low == 0 else LANES)
        block = tail - begin if tail > begin else end - begin
        if kind.first == 1:
            tail, block = end, GROUP
        for start in range(begin, end, block):
            size = min(block, end - start)
            _step_block(kind, rule, scaling, _part(kind, row, start), size, start == tail, seed, start)

    kernel = cfunc(_SIGNATURE, cache=True, error_model="numpy")(step)
    if not kernel.cache_hits:  # a warning: nothing less is shown where nobody has set up logging
        _LOG.warning("sp_lightning.optim has compiled a kernel, once on this machine: %s", kind)
    return kernel


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def step_shares(kernel: Any, rule: Rule, scaling: Scaling, rows: Any, ranges: Any, begins: Any, seed: Any) -> None:
    """Step weights, of which each thread has a share, by the loop of their kind.

    A row has the addresses of a weight's `Memory`; a range the number of its weight, its begin and its end; `begins`
    the number of the first range of each share, and of all ranges. The seed is another one for each step.
    """
    for share in prange(len(begins) - 1):
        for number in range(begins[share], begins[share + 1]):
            weight, start, stop = ranges[number]
            kernel(rule, scaling, rows[weight], start, stop, seed)
