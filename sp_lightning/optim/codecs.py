"""Codecs, compiled into the kernels: how weights and moments in fp32 lie in fewer bytes.

[Note: ties] bf16 is fp32's upper half, rounded to the nearest, and the lower half says where from: below the middle
rounded down, above it up. At the middle it may be either. Then the sign bit of the second moment, which is never
negative, says that it was up. Without such a bit the middle is rounded towards zero instead of to even.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from sp_lightning.optim.layout import GROUP

BLOCK = 64 * GROUP  # is updated in one loop, and stays in the first cache from unpacking to packing

# Calls are inlined, and what depends on types is decided when compiling: only loops without branches are vectorised.
_OPTIONS = {"nogil": True, "error_model": "numpy", "forceinline": True}
jit = njit(**_OPTIONS)
overload_inline = partial(overload, jit_options=_OPTIONS, strict=False)
U32 = np.uint32
_NOT_FINITE = U32(0x7F800000)
SIGN, MAGNITUDE = U32(0x80000000), U32(0x7FFFFFFF)


# ---------------------------------------------------------------------------------------------------- bits of numbers


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), lambda _, builder, sig, args: builder.fma(*args)


@intrinsic
def bits_of(context: Any, number: Any) -> Any:
    """Return the bits of a float."""
    return types.uint32(types.float32), lambda _, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """Return the float with these bits."""
    return types.float32(types.uint32), lambda _, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@jit
def is_finite(bits: Any) -> Any:
    """Tell whether these are neither those of an infinity nor of NaN."""
    return (bits & _NOT_FINITE) != _NOT_FINITE


@jit
def plain_nan(bits: Any) -> Any:
    """Replace every NaN by the one that `.bfloat16()` makes of it."""
    return U32(0x7FC00000) if (bits & MAGNITUDE) > _NOT_FINITE else bits


@jit
def to_bf16(bits: Any) -> Any:
    """Round to the nearest, ties to even, as `.bfloat16()` does."""
    bits = plain_nan(bits)
    return U32(U32(bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@jit
def noise(seed: Any, index: Any) -> Any:
    """Return 32 random bits for an element: the same on any number of threads, and when training is resumed."""
    # numba computes in 64 bits what is not cast
    x = U32(U32(seed) ^ U32(U32(index) * U32(0x9E3779B9)))
    x = U32(U32(x ^ (x >> U32(16))) * U32(0x7FEB352D))
    x = U32(U32(x ^ (x >> U32(15))) * U32(0x846CA68B))
    return U32(x ^ (x >> U32(16)))


# ------------------------------------------------------------------------------------------------------- the gradient


def load(memory: Any, i: Any) -> Any:
    """Read a number from an array of fp32, or of the bits of bf16."""


@overload_inline(load)
def _load(memory: Any, i: Any) -> Any:
    if memory.dtype == types.uint16:
        return lambda memory, i: float_of(U32(U32(memory[i]) << U32(16)))
    return lambda memory, i: memory[i]


# --------------------------------------------------------------------------------------------------------- the weight


def load_weight(weight: Any, low: Any, i: Any, was_up: Any) -> Any:
    """Read a master; `was_up` tells how a tie was rounded."""


@overload_inline(load_weight)
def _load_weight(weight: Any, low: Any, i: Any, was_up: Any) -> Any:
    if isinstance(low, types.NoneType):
        return lambda weight, low, i, was_up: load(weight, i)
    middle, shift = _split(low)

    def load_split(weight: Any, low: Any, i: Any, was_up: Any) -> Any:
        lower = U32(low[i])
        up = U32((lower > middle) | ((lower == middle) & was_up))
        return float_of(U32(U32(U32(U32(weight[i]) - up) << U32(16)) | U32(lower << shift)))

    return load_split


def _split(low: Any) -> Any:
    """Return the middle of the low bits, and by how many bits they are shifted."""
    return U32(1 << (low.dtype.bitwidth - 1)), U32(16 - low.dtype.bitwidth)


def store_weight(weight: Any, low: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
    """Write a master, and return whether it lay in the middle and was rounded up, which only a sign bit can tell."""


@overload_inline(store_weight)
def _store_weight(weight: Any, low: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
    if not isinstance(low, types.NoneType):
        middle, shift = _split(low)
        cast, mask = np.uint16 if shift == 0 else np.uint8, U32(2 * int(middle) - 1)

        def store_split(weight: Any, low: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
            bits = plain_nan(bits_of(p))
            if shift and is_finite(bits):
                bits = U32(bits + (random >> U32(24)))  # rounded at random, or small updates would vanish
            lower, upper = U32(U32(bits >> shift) & mask), U32(bits >> U32(16))
            at_middle = (lower == middle) & has_sign & ((upper & U32(1)) == U32(1))
            weight[i] = np.uint16(upper + U32((lower > middle) | at_middle))
            low[i] = cast(lower)
            return at_middle

        return store_split

    if weight.dtype == types.float32:

        def store_float(weight: Any, low: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
            weight[i] = p
            return False

        return store_float

    def store_bf16(weight: Any, low: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
        weight[i] = np.uint16(to_bf16(bits_of(p)))
        return False

    return store_bf16


# ------------------------------------------------------------------------------------------------- moments, in blocks


def space(moment: Any) -> Any:
    """Return memory for a block of an unpacked moment, where there is anything to unpack."""


@overload_inline(space)
def _space(moment: Any) -> Any:
    if isinstance(moment, types.Array) and moment.dtype == types.float32:
        return lambda moment: moment
    return lambda moment: np.zeros(BLOCK, np.float32)


def unpack(moment: Any, start: Any, stop: Any, block: Any) -> Any:
    """Return a block of a moment in fp32: what is in memory, or `block`, filled."""


@overload_inline(unpack)
def _unpack(moment: Any, start: Any, stop: Any, block: Any) -> Any:
    if isinstance(moment, types.NoneType):
        return lambda moment, start, stop, block: block
    if isinstance(moment, types.BaseTuple):
        decode = decode_signed if moment[0].dtype == types.int8 else decode_positive

        def unpack_codes(moment: Any, start: Any, stop: Any, block: Any) -> Any:
            for first in range(start, stop, GROUP):
                codes = moment[0][first : min(first + GROUP, stop)]
                out = block[first - start :]
                scale = moment[1][first // GROUP]
                for i in range(len(codes)):
                    out[i] = decode(codes[i], scale)
            return block

        return unpack_codes
    if moment.dtype == types.float32:
        return lambda moment, start, stop, block: moment[start:stop]

    def unpack_bf16(moment: Any, start: Any, stop: Any, block: Any) -> Any:
        part = moment[start:stop]
        for i in range(len(part)):
            block[i] = load(part, i)
        return block

    return unpack_bf16


def pack(moment: Any, start: Any, stop: Any, block: Any, seed: Any, offset: Any) -> Any:
    """Write an unpacked block back."""


@overload_inline(pack)
def _pack(moment: Any, start: Any, stop: Any, block: Any, seed: Any, offset: Any) -> Any:
    if isinstance(moment, types.NoneType) or getattr(moment, "dtype", None) == types.float32:
        return lambda moment, start, stop, block, seed, offset: None
    if isinstance(moment, types.BaseTuple):
        signed = moment[0].dtype == types.int8
        encode, cast, size_of = (encode_signed, np.int8, abs) if signed else (encode_positive, np.uint8, np.sqrt)

        def pack_codes(moment: Any, start: Any, stop: Any, block: Any, seed: Any, offset: Any) -> Any:
            for first in range(start, stop, GROUP):
                codes = moment[0][first : min(first + GROUP, stop)]
                values = block[first - start :]
                largest = U32(0)  # of floats without a sign the bits have the same order; NaN is above all
                for i in range(len(codes)):
                    largest = U32(max(largest, U32(bits_of(values[i]) & MAGNITUDE)))
                scale = size_of(float_of(largest))
                moment[1][first // GROUP] = scale
                inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
                base, key = U32(offset + first), U32(seed)
                for i in range(len(codes)):
                    codes[i] = cast(np.int32(encode(values[i], inverse, noise(key, U32(base + U32(i))))))

        return pack_codes

    def pack_bf16(moment: Any, start: Any, stop: Any, block: Any, seed: Any, offset: Any) -> Any:
        part, base, key = moment[start:stop], U32(offset + start), U32(seed)
        for i in range(len(part)):
            bits = plain_nan(bits_of(block[i]))
            random = U32(noise(key, U32(base + U32(i))) >> U32(16))  # or slow averages would stand still
            part[i] = np.uint16(U32(bits + (random if is_finite(bits) else U32(0))) >> U32(16))

    return pack_bf16


@jit
def encode_signed(x: Any, inverse: Any, noise: Any) -> Any:
    """Compand to 255 steps, finer near zero."""
    x = x * inverse
    return np.rint(np.float32(254) * x / (np.float32(1) + abs(x)))


@jit
def decode_signed(code: Any, scale: Any) -> Any:
    """Undo `encode_signed`."""
    y = np.float32(code) * np.float32(1 / 127)
    return y / (np.float32(2) - abs(y)) * scale


@jit
def encode_positive(x: Any, inverse: Any, noise: Any) -> Any:
    """Take the square root to 256 steps, at random up or down; only zero is zero, since weights are divided by it."""
    y = np.float32(255) * np.sqrt(x) * inverse
    code = np.floor(y + np.float32(np.int32(noise >> U32(8))) * np.float32(2**-24))
    if code < np.float32(1) and x > np.float32(0):
        code = np.float32(1)
    return min(code, np.float32(255))


@jit
def decode_positive(code: Any, scale: Any) -> Any:
    """Undo `encode_positive`."""
    root = np.float32(code) * np.float32(1 / 255) * scale
    return root * root
