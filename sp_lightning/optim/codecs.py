"""Codecs, compiled into the kernels: how weights and moments in fp32 lie in fewer bytes.

A number lies at an address, in elements of so many bytes. Their width and flags are constants when a kernel is
compiled, so that its loop has no branches, as only such are vectorised:

    weight   4: fp32 | 2: bf16, and in `low` beside it 2: the lower 16 bits of the fp32 master | 0: none, as in torch
    moment   4: fp32 | 2: bf16, as in torch | 1: codes, with a scale in fp32 for each `GROUP` of them | 0: none

[Note: ties] bf16 is fp32's upper half, rounded to the nearest, and the lower half says where from: below the middle
rounded down, above it up. At the middle it may be either. Then the sign bit of the second moment, which is never
negative, says that it was up. Without such a bit the middle is rounded away from zero instead of to even.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import Kind, Memory, Scaling

jit = njit(nogil=True, error_model="numpy", forceinline=True)
# no bits are promised
near = njit(nogil=True, error_model="numpy", forceinline=True, fastmath={"arcp", "contract"})
# numba computes in 64 bits what is not cast
I8, I16, I32, F32 = np.int8, np.int16, np.int32, np.float32
U8, U16, U32 = np.uint8, np.uint16, np.uint32

_FILES = ("codecs.py", "layout.py", "rules.py")
SOURCES = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in _FILES))
"""Numba's cache on disk looks at a kernel's file only: this has it compile again when these have changed."""


# -------------------------------------------------------------------------------------------------- bits and memory


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    number = types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return number(number, number, number), generate


@intrinsic
def read(context: Any, address: Any, i: Any, like: Any) -> Any:
    """Read an element of memory that holds numbers like this one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_element(context, builder, arguments[0], arguments[1], like))

    return like(address, types.intp, like), generate


@intrinsic
def write(context: Any, address: Any, i: Any, value: Any) -> Any:
    """Write an element of memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _element(context, builder, arguments[0], arguments[1], value))
        return context.get_dummy_value()

    return types.void(address, types.intp, value), generate


def _element(context: Any, builder: Any, address: Any, i: Any, kind: Any) -> Any:
    cast = builder.bitcast if isinstance(address.type, ir.PointerType) else builder.inttoptr
    return builder.gep(cast(address, context.get_value_type(types.CPointer(kind))), [i])


@intrinsic
def space(context: Any) -> Any:
    """Return a pointer to memory for a group, of which the compiler knows that it overlaps nothing."""

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
    """Return the bits of a float; of every NaN those that `.bfloat16()` makes of it."""
    return U32(0x7FC00000) if number != number else bits_of(number)


@jit
def nearest(bits: Any) -> Any:
    """Return bits whose upper half is the nearest bf16, ties to even, as `.bfloat16()` rounds."""
    return U32(bits + U32(0x7FFF) + U32((bits >> U32(16)) & U32(1)))


@jit
def key_at(seed: Any, index: Any) -> Any:
    """Return the key of `noise` from an element on: the same on any number of threads, and when resumed."""
    x = U32(U32(seed) ^ U32(0x9E3779B9))
    x = U32(U32(x ^ (x >> U32(16))) * U32(0x7FEB352D))
    x = U32(U32(x ^ (x >> U32(15))) * U32(0x846CA68B))
    return noise(U32(x ^ (x >> U32(16))), index)


@jit
def noise(key: Any, i: Any) -> Any:
    """Return 32 bits for rounding an element at random: with a random key each is uniform, neighbours spread evenly."""
    return U32(key + U32(i) * U32(0x9E3779B9))


# --------------------------------------------------------------------------------- gradients, numbers and masters


@jit
def load(address: Any, width: Any, i: Any) -> Any:
    """Read a number in fp32 or bf16."""
    if width == 4:
        return read(address, i, F32(0))
    return float_of(U32(read(address, i, U16(0))) << U32(16))


@jit
def store(address: Any, width: Any, i: Any, value: Any) -> Any:
    """Write a number in fp32, or in bf16, rounded to the nearest."""
    if width == 4:
        write(address, i, F32(value))
    else:
        write(address, i, U16(nearest(plain_bits(value)) >> U32(16)))


@jit
def scaled(g: Any, scaling: Scaling, operations: Any, in_bf16: Any) -> Any:
    """Scale and clip a gradient, each operation rounded by itself, as torch does in passes of their own."""
    if operations > 0:
        g = _times(g, scaling.factor, in_bf16)
    if operations > 1:
        g = _times(g, scaling.then, in_bf16)
        g = scaling.limit if g > scaling.limit else (-scaling.limit if g < -scaling.limit else g)
    return g


@jit
def _times(g: Any, factor: Any, in_bf16: Any) -> Any:
    g = g * factor
    return float_of(nearest(plain_bits(g)) & U32(0xFFFF0000)) if in_bf16 else g


@jit
def load_weight(kind: Kind, memory: Memory, i: Any, was_up: Any) -> Any:
    """Read a master; `was_up`, 0 or 1, tells how a tie was rounded."""
    if kind.low == 0:
        return load(memory.weight, kind.weight, i)
    low = I32(read(memory.low, i, I16(0)))  # negative if it was rounded up, as a tie is to be then
    above = U32(1) if low < I32(I32(-0x7FFF) - I32(was_up)) else U32(0)
    high = U32(U32(read(memory.weight, i, U16(0))) + above)
    return float_of(U32(high << U32(16)) + U32(low))


@jit
def store_weight(kind: Kind, memory: Memory, i: Any, p: Any, has_sign: Any) -> Any:
    """Write a master. Return 1 if it lay in the middle and was rounded up, which only a sign bit can tell."""
    if kind.low == 0:
        store(memory.weight, kind.weight, i, p)
        return U32(0)
    bits = plain_bits(p)
    write(memory.low, i, U16(bits))
    odd = U32((bits >> U32(16)) & U32(1)) if has_sign else U32(1)
    write(memory.weight, i, U16(U32(bits + U32(0x7FFF) + odd) >> U32(16)))
    return U32(1) if has_sign and U32(bits & U32(0x1FFFF)) == U32(0x18000) else U32(0)


# ------------------------------------------------------------------------------------------------------ the moments


@jit
def load_moment(moment: Any, width: Any, scale: Any, i: Any, is_second: Any) -> Any:
    """Read a moment; one that an optimizer has not is zero."""
    if width == 0:
        return F32(0)
    if width > 1:
        return load(moment, width, i)
    if is_second:
        return decode_positive(read(moment, i, U8(0)), scale)
    return decode_signed(read(moment, i, I8(0)), scale)


@jit
def pack(memory: Memory, staged: Any, size: Any, key: Any) -> None:
    """Write a group in codes: first moments, and the roots of second ones."""
    if size == GROUP:  # a constant, for which loops have no ends to take care of
        _pack(memory, staged, GROUP, key)
    else:
        _pack(memory, staged, size, key)


@jit
def _pack(memory: Memory, staged: Any, size: Any, key: Any) -> None:
    first_scale = _scale_of(staged[0], size)
    second_scale = _scale_of(staged[1], size)
    write(memory.first_scale, 0, first_scale)
    write(memory.second_scale, 0, second_scale)
    for i in range(size):  # one loop for both: while it divides for one, it computes the other
        first = encode_signed(read(staged[0], i, F32(0)), first_scale)
        write(memory.first, i, I8(first))
        second = encode_positive(read(staged[1], i, F32(0)), second_scale, noise(key, i))
        # they are in this range, but AVX2 packs in fewer operations what saturates
        write(memory.second, i, U8(min(max(second, I32(0)), I32(255))))


@jit
def _scale_of(staged: Any, size: Any) -> Any:
    """Return the largest magnitude in a group, or NaN if there is one."""
    most = U32(0)  # of floats without a sign the bits have the same order; NaN is above all
    for i in range(size):
        most = U32(max(most, U32(read(staged, i, U32(0)) & U32(0x7FFFFFFF))))
    return float_of(most)


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
    step = scale * F32(1 / 256)
    root = F32(code) * step + step
    return root * root
