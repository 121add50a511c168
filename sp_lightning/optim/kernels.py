"""One pass over host memory for an optimizer's step, compiled by numba: gradient in, weight and state out.

    gradient -> fp32 -> scale, clip -> `_adam`: weight, moments -> codecs -> memory, and a copy of the weight

`compile_loop` compiles a loop for each `Kind`, and keeps it on disk. `step_ranges`, which is compiled on import,
has it step all weights of a unit on several threads. This is one call, because the thread that launches kernels may
have to wait each time that a call takes or returns Python's lock.

[Note: bits] `_adam` has the bits of torch's fused CPU kernels. `fma` stands where their compiler contracts; the
elements that are left over at the end of a tensor (`tail`) are compiled another way. `tests/optim` tries it.
"""

from __future__ import annotations

import logging
import zlib
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, prange, typeof, types
from numba.core.registry import cpu_target

from sp_lightning.optim.codecs import (
    F32,
    I8,
    I16,
    SOURCES,
    U8,
    U16,
    U32,
    bits_of,
    decode_positive,
    decode_signed,
    float_of,
    fma,
    jit,
    load,
    load_weight,
    noise,
    pack,
    pointer_to,
    scaled,
    space,
    store,
    store_weight,
)
from sp_lightning.optim.layout import GROUP, LANES
from sp_lightning.optim.rules import NO_SCALING, ONE, Kind, Memory, Rule, Scaling

_LOG = logging.getLogger(__name__)


@jit
def _adam(kind: Kind, rule: Rule, p: Any, g: Any, m: Any, v: Any, tail: Any) -> Any:
    """Return a weight and its two moments after a step, from those before it and the gradient; all in fp32.

    The bits are promised unless moments are kept in codes.
    """
    if kind.is_penalized:
        g = fma(p, rule.penalty, g)
    from_m = bits_of(rule.first_rate) < bits_of(F32(0.5))  # as integers: it stays in a loop
    m = fma(rule.first_rate if from_m else rule.first_rate - F32(1), g - m, m if from_m else g)
    if tail:
        v = fma(v, rule.second_decay, rule.second_rate * g * g)
    else:
        v = fma(rule.second_rate * g, g, v * rule.second_decay)
    if kind.is_coded:  # to divide takes long
        divisor = fma(np.sqrt(v), F32(1) / rule.correction, rule.eps)
        return fma(p, rule.decay, -rule.lr * m / divisor), m, v
    return p * rule.decay - rule.lr * m / (np.sqrt(v) / rule.correction + rule.eps), m, v


@jit
def _lion(rule: Rule, p: Any, g: Any, m: Any) -> Any:
    """Return a weight and its moment after a step; all in fp32, and each operation rounds."""
    mean = m * rule.correction + g * rule.first_rate
    sign = F32(1) if mean > 0 else F32(-1) if mean < 0 else F32(0)
    return p * rule.decay - sign * rule.lr, m * rule.second_decay + g * rule.second_rate


@jit
def _step_block(
    kind: Kind, rule: Rule, scaling: Scaling, memory: Memory, size: Any, tail: Any, key: Any
) -> None:  # fmt: skip
    staged = carray(space(), GROUP), carray(space(), GROUP)
    has_second = kind.second > 0
    m_scale = memory.first_scale[0] if kind.is_coded else F32(0)
    v_scale = memory.second_scale[0] if kind.is_coded and has_second else F32(0)
    has_ties = has_second and not kind.is_coded  # see [Note: ties]
    for i in range(size):
        g = load(memory.gradient, i)
        if kind.is_scaled:
            g = scaled(g, scaling, kind.weight == 2 and kind.gradient == 2)
        if kind.is_coded:
            m = decode_signed(memory.first[i], m_scale)
            v = decode_positive(memory.second[i], v_scale) if has_second else F32(0)
        else:
            m = load(memory.first, i)
            v = load(memory.second, i) if has_second else F32(0)
        was_up = U32(bits_of(v) >> 31) if has_ties else U32(1)
        v = abs(v)
        p = load_weight(kind, memory, i, was_up)
        if has_second:
            p, m, v = _adam(kind, rule, p, g, m, v, tail)
        else:
            p, m = _lion(rule, p, g, m)
        up = store_weight(kind, memory, i, p, has_ties)
        if kind.copy > 0:
            store(memory.copy, i, p)
        if kind.is_coded:
            # moments to be packed are staged, because their scale is known only with the whole group
            staged[0][i] = m
            staged[1][i] = np.sqrt(v)  # the update has computed this root already
        else:
            store(memory.first, i, m)
            if has_second:
                store(memory.second, i, float_of(bits_of(v) | (up << 31)))
    if kind.is_coded:
        pack(kind, memory, staged, size, key)


_SIGNATURE = types.void(
    typeof(Rule(*[ONE] * 8)),
    typeof(NO_SCALING),
    types.int64[::1],
    types.int64,
    types.int64,
    types.int64,
)


# machine code depends on these files and on the CPU
_MADE_FOR = zlib.crc32(repr((SOURCES, cpu_target.target_context.codegen().magic_tuple())).encode())


def _on_disk(function: Any, *kind: int) -> Any:
    """Return a function under a name on disk that only the same machine code has.

    Functions of one name share an index. Processes that compile two of them at the same time may write them under the
    same number, and each would load the other's from then on.
    """
    function.__qualname__ = "_".join(map(str, (function.__name__, *kind, _MADE_FOR)))
    return function


def compile_loop(kind: Kind) -> Any:
    """Compile the loop of a kind, which steps a range of a weight."""
    number = {4: F32, 2: U16, 0: U16}
    weight, gradient, copy = number[kind.weight], number[kind.gradient], number[kind.copy]
    first, second = (I8, U8) if kind.is_coded else (number[kind.first], number[kind.second])
    lanes = 2 * LANES if kind.weight == 2 and kind.low == 0 else LANES

    def step(rule: Rule, scaling: Scaling, row: Any, begin: Any, end: Any, seed: Any) -> None:
        """Step a range in blocks: groups of codes, or whole vectors and the elements that are left over."""
        tail = end - (end - begin) % lanes
        block = tail - begin if tail > begin else end - begin
        if kind.is_coded:
            tail, block = end, GROUP
        for start in range(begin, end, block):
            size = min(block, end - start)
            group = 4 * (start // GROUP)
            memory = Memory(
                carray(pointer_to(row[0] + kind.weight * start), size, weight),
                carray(pointer_to(row[1] + kind.low * start), size, I16),
                carray(pointer_to(row[2] + kind.gradient * start), size, gradient),
                carray(pointer_to(row[3] + kind.first * start), size, first),
                carray(pointer_to(row[4] + kind.second * start), size, second),
                carray(pointer_to(row[5] + kind.copy * start), size, copy),
                carray(pointer_to(row[6] + group), 1, F32),
                carray(pointer_to(row[7] + group), 1, F32),
            )
            key = noise(seed, row[8] + start)
            _step_block(kind, rule, scaling, memory, size, start == tail, key)

    kernel = cfunc(_SIGNATURE, cache=True, error_model="numpy")(_on_disk(step, *kind))
    if not kernel.cache_hits:
        _say_that_kernels_are_compiled()
    return kernel


@cache
def _say_that_kernels_are_compiled() -> None:
    _LOG.info("superpipeline: numba compiles kernels for the optimizer, once on this machine.")


_RANGES = types.void(
    types.FunctionType(_SIGNATURE),
    *_SIGNATURE.args[:2],
    types.int64[:, ::1],
    types.int64[:, ::1],
    types.int64,
)


@njit(_RANGES, nogil=True, error_model="numpy", cache=True, parallel=True)
@_on_disk
def step_ranges(kernel: Any, rule: Rule, scaling: Scaling, rows: Any, ranges: Any, seed: Any) -> None:
    """Step weights, in ranges that threads share, by the loop of their kind.

    A row has the addresses of a weight's `Memory`, and the offset in the weight at which that begins; a range has the
    number of its row, its begin and its end. Each step has another seed.
    """
    for number in prange(len(ranges)):
        row, start, stop = ranges[number]
        kernel(rule, scaling, rows[row], start, stop, seed)
