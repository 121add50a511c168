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

from sp_lightning.optim.layout import BLOCK, GROUP

# Calls are inlined, and what depends on types is decided when compiling: only loops without branches are vectorised.
_OPTIONS = {"nogil": True, "error_model": "numpy", "forceinline": True}
jit = njit(**_OPTIONS)
near = njit(**_OPTIONS, fastmath={"arcp", "contract"})  # where no bits are promised
overload_inline = partial(overload, jit_options=_OPTIONS, strict=False)
U32 = np.uint32
MAGNITUDE = U32(0x7FFFFFFF)


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
def plain_bits(number: Any) -> Any:
    """Return the bits of a float; of every NaN those that `.bfloat16()` makes of it."""
    return U32(0x7FC00000) if number != number else bits_of(number)


@jit
def to_bf16(number: Any) -> Any:
    """Round to the nearest, ties to even, as `.bfloat16()` does."""
    bits = plain_bits(number)
    return np.uint16(U32(bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@jit
def _mixed(seed: Any, index: Any) -> Any:
    # numba computes in 64 bits what is not cast
    x = U32(U32(seed) ^ U32(U32(index) * U32(0x9E3779B9)))
    x = U32(U32(x ^ (x >> U32(16))) * U32(0x7FEB352D))
    x = U32(U32(x ^ (x >> U32(15))) * U32(0x846CA68B))
    return U32(x ^ (x >> U32(16)))


def key_of(seed: Any, salt: Any, index: Any) -> Any:
    """Return 32 random bits for the elements from an index on: the same on any number of threads, and when resumed.

    Without a seed nothing is random.
    """


@overload_inline(key_of)
def _key_of(seed: Any, salt: Any, index: Any) -> Any:
    if isinstance(seed, types.NoneType):
        return lambda seed, salt, index: U32(0)
    return lambda seed, salt, index: _mixed(seed ^ salt, index)


@jit
def noise(key: Any, i: Any) -> Any:
    """Return 32 bits for rounding an element at random: with a random key each is uniform, neighbours spread evenly."""
    return U32(key + U32(i) * U32(0x9E3779B9))


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
    """Read a master; `was_up`, 0 or 1, tells how a tie was rounded."""


@overload_inline(load_weight)
def _load_weight(weight: Any, low: Any, i: Any, was_up: Any) -> Any:
    if isinstance(low, types.NoneType):
        return lambda weight, low, i, was_up: load(weight, i)
    shift = U32(16 - low.dtype.bitwidth)

    def load_split(weight: Any, low: Any, i: Any, was_up: Any) -> Any:
        lower = U32(U32(low[i]) << shift)
        up = U32(U32(lower + U32(0x7FFF) + was_up) & U32(0x10000))  # what rounding up has added
        return float_of(U32(U32(U32(weight[i]) << U32(16)) + lower - up))

    return load_split


def store_weight(weight: Any, low: Any, lowered: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
    """Write a master, and its bf16 copy if there is one.

    Return 1 if it lay in the middle and was rounded up, which only a sign bit can tell.
    """


@overload_inline(store_weight)
def _store_weight(weight: Any, low: Any, lowered: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
    if not isinstance(low, types.NoneType):
        shift = U32(16 - low.dtype.bitwidth)
        cast = np.uint16 if shift == 0 else np.uint8

        def store_split(weight: Any, low: Any, lowered: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
            bits = plain_bits(p)
            if shift:  # rounded at random, or small updates would vanish
                bits = U32(U32(bits + (random >> U32(24))) & U32(0xFFFFFF00))
            odd = U32((bits >> U32(16)) & has_sign)
            weight[i] = np.uint16(U32(bits + U32(0x7FFF) + odd) >> U32(16))
            low[i] = cast(bits >> shift)
            return has_sign if U32(bits & U32(0x1FFFF)) == U32(0x18000) else U32(0)

        return store_split

    if weight.dtype == types.float32:
        has_copy = not isinstance(lowered, types.NoneType)

        def store_float(weight: Any, low: Any, lowered: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
            weight[i] = p
            if has_copy:
                lowered[i] = to_bf16(p)
            return U32(0)

        return store_float

    def store_bf16(weight: Any, low: Any, lowered: Any, i: Any, p: Any, has_sign: Any, random: Any) -> Any:
        weight[i] = to_bf16(p)
        return U32(0)

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
                codes, scale, values = moment[0][first:], moment[1][first // GROUP], block[first - start :]
                if stop - first >= GROUP:  # a constant, for which the loop has no ends to take care of
                    for i in range(GROUP):
                        values[i] = decode(codes[i], scale)
                else:
                    for i in range(stop - first):
                        values[i] = decode(codes[i], scale)
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


def staged(moment: Any, value: Any) -> Any:
    """Return what `pack` wants to find in a block for a value."""


@overload_inline(staged)
def _staged(moment: Any, value: Any) -> Any:
    if isinstance(moment, types.BaseTuple) and moment[0].dtype == types.uint8:
        return lambda moment, value: np.sqrt(value)  # which the update has computed already
    return lambda moment, value: value


def pack(moment: Any, start: Any, stop: Any, block: Any, seed: Any, salt: Any, offset: Any) -> Any:
    """Write a block of staged values back."""


@overload_inline(pack)
def _pack(moment: Any, start: Any, stop: Any, block: Any, seed: Any, salt: Any, offset: Any) -> Any:
    if isinstance(moment, types.NoneType) or getattr(moment, "dtype", None) == types.float32:
        return lambda moment, start, stop, block, seed, salt, offset: None
    if isinstance(moment, types.BaseTuple):
        signed = moment[0].dtype == types.int8
        encode, cast = (encode_signed, np.int8) if signed else (encode_positive, np.uint8)

        def pack_codes(moment: Any, start: Any, stop: Any, block: Any, seed: Any, salt: Any, offset: Any) -> Any:
            for first in range(start, stop, GROUP):
                values = block[first - start :]
                scale = largest(values, GROUP) if stop - first >= GROUP else largest(values, stop - first)
                moment[1][first // GROUP] = scale
            for first in range(start, stop, GROUP):  # apart, as the largest is known late
                codes, scale, values = moment[0][first:], moment[1][first // GROUP], block[first - start :]
                key = key_of(seed, salt, offset + first)
                if stop - first >= GROUP:
                    for i in range(GROUP):
                        codes[i] = cast(encode(values[i], scale, noise(key, i)))
                else:
                    for i in range(stop - first):
                        codes[i] = cast(encode(values[i], scale, noise(key, i)))

        return pack_codes

    is_random = not isinstance(seed, types.NoneType)

    def pack_bf16(moment: Any, start: Any, stop: Any, block: Any, seed: Any, salt: Any, offset: Any) -> Any:
        part, key = moment[start:stop], key_of(seed, salt, offset + start)
        for i in range(len(part)):
            if is_random:  # or slow averages would stand still
                part[i] = np.uint16(U32(plain_bits(block[i]) + (noise(key, i) >> U32(16))) >> U32(16))
            else:
                part[i] = to_bf16(block[i])

    return pack_bf16


@jit
def largest(values: Any, size: Any) -> Any:
    """Return the largest magnitude, or NaN."""
    most = U32(0)  # of floats without a sign the bits have the same order; NaN is above all
    for i in range(size):
        most = U32(max(most, U32(bits_of(values[i]) & MAGNITUDE)))
    return float_of(most)


@near
def encode_signed(x: Any, scale: Any, noise: Any) -> Any:
    """Compand to 255 steps, finer near zero."""
    largest = scale if scale > 0 else np.float32(1)
    return np.int32(np.rint(np.float32(254) * x / (largest + abs(x))))


@near
def decode_signed(code: Any, scale: Any) -> Any:
    """Undo `encode_signed`."""
    code = np.float32(code)
    return code * scale / (np.float32(254) - abs(code))


@near
def encode_positive(root: Any, scale: Any, noise: Any) -> Any:
    """Take a square root to 256 steps, at random up or down; only zero is zero, since weights are divided by it."""
    factor = np.float32(255 * 65536 - 16) / (scale if scale > 0 else np.float32(1))  # a bit less: 256 has no code
    code = np.int32(np.int32(np.int32(root * factor) + np.int32(noise >> U32(16))) >> np.int32(16))
    return max(code, min(np.int32(bits_of(root)), np.int32(1)))


@near
def decode_positive(code: Any, scale: Any) -> Any:
    """Undo `encode_positive`."""
    root = np.float32(code) * (scale * np.float32(1 / 255))
    return root * root
