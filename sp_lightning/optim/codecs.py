"""Codecs, compiled into the kernels: how weights and moments in fp32 lie in fewer bytes.

Memory is an array, in which bf16 lies as its 16 bits. The bytes of its elements are constants when a kernel is
compiled, so that its loop has no branches, as only such are vectorised:

    weight   4: fp32 | 2: bf16, and in `low` beside it 2: the lower 16 bits of the fp32 master | 0: none, as in torch
    moment   4: fp32 | 2: bf16, as in torch | 1: codes, with a scale in fp32 for each `GROUP` of them

[Note: ties] bf16 is fp32's upper half, rounded to the nearest, and the lower half tells the direction: a lower half
below the middle was rounded down, one above it up. At the middle it may be either. Then the sign bit of the second
moment, which is never negative, tells that it was up. Without such a bit the middle is rounded away from zero, not to
even.
"""

from __future__ import annotations

import platform
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from sp_lightning.optim.layout import GROUP, LARGEST_FIRST, LARGEST_SECOND
from sp_lightning.optim.rules import Kind, Memory, Scaling

jit = njit(nogil=True, error_model="numpy", forceinline=True)
# no bits are promised
near = njit(nogil=True, error_model="numpy", forceinline=True, fastmath={"arcp", "contract"})
# numba computes in 64 bits unless a value, or the result, is cast
I8, I16, I32, F32 = np.int8, np.int16, np.int32, np.float32
U8, U16, U32 = np.uint8, np.uint16, np.uint32

# Torch has its CPU kernels in several builds. Only in that for old x86 processors the compiler fuses nothing.
_FUSES = platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability().startswith("AVX")
_FILES = ("codecs.py", "layout.py", "rules.py")
SOURCES = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in _FILES), int(_FUSES))
"""Numba's cache on disk looks at a kernel's file only.

A kernel's name there has this number, so changes recompile it.
"""


# -------------------------------------------------------------------------------------------------- bits and memory


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once where torch's kernels do so."""
    number = types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _FUSES:
            return builder.fma(*arguments)
        factor, other_factor, summand = arguments
        return builder.fadd(builder.fmul(factor, other_factor), summand)

    return number(number, number, number), generate


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def space(context: Any) -> Any:
    """Return a pointer to memory for a group; the compiler knows that it overlaps no other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = cgutils.alloca_once(builder, ir.FloatType(), GROUP)
        numbers.align = 64  # a vector lies in one line of the cache
        return builder.bitcast(numbers, ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(), generate


@jit
def bits_of(number: Any) -> Any:
    """Return the bits of a float."""
    return F32(number).view(U32)


@jit
def float_of(bits: Any) -> Any:
    """Return the float with these bits."""
    return U32(bits).view(F32)


@jit
def plain_bits(number: Any) -> Any:
    """Return the bits of a float; for every NaN, the bits that `.bfloat16()` makes of it."""
    return U32(0x7FC00000) if number != number else bits_of(number)


@jit
def nearest(number: Any) -> Any:
    """Return bits whose upper half is the nearest bf16, ties to even, as `.bfloat16()` rounds."""
    bits = plain_bits(number)
    return U32(bits + 0x7FFF + ((bits >> 16) & 1))


@jit
def noise(key: Any, i: Any) -> Any:
    """Return 32 bits for rounding an element at random: with a random key each is uniform, neighbours spread evenly."""
    return U32(key + i * 0x9E3779B9)


# --------------------------------------------------------------------------------- gradients, numbers and masters


@jit
def load(array: Any, i: Any) -> Any:
    """Read a number in fp32 or bf16."""
    if array.itemsize == 4:
        return F32(array[i])
    return float_of(U32(array[i]) << 16)


@jit
def store(array: Any, i: Any, value: Any) -> Any:
    """Write a number in fp32, or in bf16, rounded to the nearest."""
    if array.itemsize == 4:
        array[i] = F32(value)
    else:
        array[i] = U16(nearest(value) >> 16)


@jit
def scaled(g: Any, scaling: Scaling, in_bf16: Any) -> Any:
    """Scale a gradient, each operation rounded by itself, as torch does in passes of their own."""
    return _times(_times(g, scaling.factor, in_bf16), scaling.then, in_bf16)


@jit
def _times(g: Any, factor: Any, in_bf16: Any) -> Any:
    g = g * factor
    return float_of(nearest(g) & 0xFFFF0000) if in_bf16 else g


@jit
def load_weight(kind: Kind, memory: Memory, i: Any, was_up: Any) -> Any:
    """Read a master; `was_up`, 0 or 1, tells how a tie was rounded."""
    if kind.low == 0:
        return load(memory.weight, i)
    low = I32(memory.low[i])  # negative if it was rounded up, as a tie is to be then
    above = 1 if low < I32(-0x7FFF - I32(was_up)) else 0
    return float_of(((U32(memory.weight[i]) + above) << 16) + low)


@jit
def store_weight(kind: Kind, memory: Memory, i: Any, p: Any, has_sign: Any) -> Any:
    """Write a master. Return 1 if it lay in the middle and was rounded up, which only a sign bit can tell."""
    if kind.low == 0:
        store(memory.weight, i, p)
        return U32(0)
    bits = plain_bits(p)
    memory.low[i] = I16(bits)
    odd = (bits >> 16) & 1 if has_sign else 1
    memory.weight[i] = U16(U32(bits + 0x7FFF + odd) >> 16)
    return U32(1) if has_sign and U32(bits & 0x1FFFF) == U32(0x18000) else U32(0)


# ------------------------------------------------------------------------------------------------------ the moments


@jit
def pack(kind: Kind, memory: Memory, staged: Any, size: Any, key: Any) -> None:
    """Write a group in codes: first moments, and the roots of second ones, if there are any."""
    first_scale = _scale_of(staged[0], size, LARGEST_FIRST)
    second_scale = _scale_of(staged[1], size, LARGEST_SECOND**0.5)
    memory.first_scale[0] = first_scale
    if kind.second > 0:
        memory.second_scale[0] = second_scale
    for i in range(size):  # one loop for both: while it divides for one, it computes the other
        memory.first[i] = I8(encode_signed(staged[0][i], first_scale))
        if kind.second > 0:
            second = encode_positive(staged[1][i], second_scale, noise(key, i))
            # they are in this range, but AVX2 packs values that saturate in fewer operations
            memory.second[i] = U8(min(max(second, I32(0)), I32(255)))


@jit
def _scale_of(staged: Any, size: Any, largest: Any) -> Any:
    """Return the largest magnitude in a group, or NaN if there is one; limit all numbers to `largest`."""
    most = U32(0)  # the bits of floats without a sign have the same order; NaN is above all
    for i in range(size):
        most = max(most, U32(bits_of(staged[i]) & 0x7FFFFFFF))
    scale = float_of(most)
    if scale > F32(largest):  # hardly ever
        scale = F32(largest)
        for i in range(size):
            staged[i] = min(max(staged[i], -scale), scale)
    return scale


@near
def encode_signed(x: Any, scale: Any) -> Any:
    """Compand to 255 steps, finer near zero."""
    largest = scale if scale > 0 else F32(1)
    return np.int32(np.rint(F32(254) * x / (largest + abs(x))))


@near
def decode_signed(code: Any, scale: Any) -> Any:
    """Undo `encode_signed`."""
    code = F32(code)
    return code * scale / (F32(254) - abs(code))


@near
def encode_positive(root: Any, scale: Any, noise: Any) -> Any:
    """Take a square root to one of 256 steps, at random up or down; from below the first one up: it is divided by."""
    # or some would round to 257
    factor = F32(256 * (1 - 2**-20)) / (scale if scale > 0 else F32(1))
    below = F32(np.int32(noise)) * F32(2**-32) - F32(0.5)
    return np.int32(root * factor + below)  # -1 to 0 is cut to 0


@near
def decode_positive(code: Any, scale: Any) -> Any:
    """Undo `encode_positive`."""
    root = (F32(code) + F32(1)) * (scale * F32(1 / 256))
    return root * root
