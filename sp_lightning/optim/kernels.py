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
from sp_lightning.optim.rules import ADAM, NO_SCALING, Kind, Memory, Rule, Scaling

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
    if kind.first > 0:
        m = g = _momentum(rule, g, m, tail)
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
def _step_block(kind: Kind, rule: Rule, scaling: Scaling, memory: Memory, size: Any, tail: Any, key: Any) -> None:
    has_sign = kind.second > 1  # to keep a tie in, see [Note: ties]
    is_coded = kind.first == 1
    staged = space(), space()
    m_scale = read(memory.first_scale, 0, F32(0)) if is_coded else F32(0)
    v_scale = read(memory.second_scale, 0, F32(0)) if is_coded else F32(0)
    for i in range(size):
        g = load(memory.gradient, kind.gradient, i)
        g = scaled(g, scaling, kind.operations, kind.weight == 2 and kind.gradient == 2)
        m = load_moment(memory.first, kind.first, m_scale, i, False)
        v = load_moment(memory.second, kind.second, v_scale, i, True)
        was_up = U32(bits_of(v) >> U32(31)) if has_sign else U32(1)
        p = load_weight(kind, memory, i, was_up)
        p, m, v = _update(kind, rule, p, g, m, abs(v) if has_sign else v, tail)
        up = store_weight(kind, memory, i, p, has_sign)
        if kind.copy > 0:
            store(memory.copy, kind.copy, i, p)
        if is_coded:
            # what is to be packed is staged, as its scale is known when the whole group is
            write(staged[0], i, m)
            write(staged[1], i, np.sqrt(v))  # which the update has computed already
        else:
            if kind.first > 0:
                store(memory.first, kind.first, i, m)
            if kind.second > 0:
                store(memory.second, kind.second, i, float_of(bits_of(v) | U32(up << U32(31))))
    if is_coded:
        pack(memory, staged, size, key)


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
            key = key_at(seed, row[8] + start)
            _step_block(kind, rule, scaling, _part(kind, row, start), size, start == tail, key)

    kernel = cfunc(_SIGNATURE, cache=True, error_model="numpy")(step)
    if not kernel.cache_hits:  # a warning: nothing less is shown where nobody has set up logging
        _LOG.warning("sp_lightning.optim has compiled a kernel, once on this machine: %s", _words_of(kind))
    return kernel


def _words_of(kind: Kind) -> str:
    dtypes = {4: "fp32", 2: "bf16", 1: "int8"}
    weights = "split" if kind.low else dtypes[kind.weight]
    words = [
        "Adam or AdamW" if kind.update == ADAM else "SGD",
        f"{weights} weights",
        f"{dtypes[kind.gradient]} gradients",
    ]
    if kind.first:
        words.append(f"{dtypes[kind.first]} moments")
    return ", ".join(words)


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def step_shares(kernel: Any, rule: Rule, scaling: Scaling, rows: Any, ranges: Any, begins: Any, seed: Any) -> None:
    """Step weights, of which each thread has a share, by the loop of their kind.

    A row has the addresses of a weight's `Memory`, and where in the weight that begins; a range the number of its weight, its begin and its end; `begins`
    the number of the first range of each share, and of all ranges. The seed is another one for each step.
    """
    for share in prange(len(begins) - 1):
        for number in range(begins[share], begins[share + 1]):
            weight, start, stop = ranges[number]
            kernel(rule, scaling, rows[weight], start, stop, seed)
