"""Codecs, compiled into the kernels: how weights and moments in fp32 lie in fewer bytes.

[Note: ties] bf16 is fp32's upper half, rounded to the nearest, and the lower half says where from: below the middle
rounded down, above it up. At the middle it may be either. Then the sign bit of the second moment, which is never
negative, says that it was up. Without such a bit the middle is rounded away from zero instead of to even.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from sp_lightning.optim.layout import GROUP

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
        return lambda seed, salt, index: None
    return lambda seed, salt, index: _mixed(seed ^ salt, index)


def noise(key: Any, i: Any) -> Any:
    """Return 32 bits for rounding an element at random: with a random key each is uniform, neighbours spread evenly."""


@overload_inline(noise)
def _noise(key: Any, i: Any) -> Any:
    if isinstance(key, types.NoneType):
        return lambda key, i: None
    return lambda key, i: U32(key + U32(i) * U32(0x9E3779B9))


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
        at_tie = U32(U32(1) - was_up)
        lower = np.int32(np.int16(U32(U32(low[i]) << shift) - at_tie))  # negative if it was rounded up
        return float_of(U32(U32(U32(weight[i]) << U32(16)) + U32(lower) + at_tie))

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
            odd = U32((bits >> U32(16)) & U32(1)) if has_sign else U32(1)
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


# ------------------------------------------------------------------------------------------------------- the moments


@intrinsic
def _on_stack(context: Any) -> Any:
    """Return a pointer to numbers of a group on the stack, which the compiler knows to overlap with nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = cgutils.alloca_once(builder, ir.FloatType(), GROUP)
        numbers.align = 64  # a vector lies in one line of the cache
        return builder.bitcast(numbers, ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(), generate


@jit
def space() -> Any:
    """Return memory for a group of a moment, from the update to `pack`."""
    return carray(_on_stack(), GROUP)


def scale_of(moment: Any) -> Any:
    """Return the scale of a group, if its moment lies in codes."""


@overload_inline(scale_of)
def _scale_of(moment: Any) -> Any:
    if isinstance(moment, types.BaseTuple):
        return lambda moment: moment[1][0]
    return lambda moment: None


def is_packed(moment: Any) -> Any:
    """Tell whether a moment lies in codes, whose groups are updated one by one."""


@overload_inline(is_packed)
def _is_packed(moment: Any) -> Any:
    answer = isinstance(moment, types.BaseTuple)
    return lambda moment: answer


def load_moment(moment: Any, scale: Any, i: Any) -> Any:
    """Read a moment; one that an optimizer has not is zero."""


@overload_inline(load_moment)
def _load_moment(moment: Any, scale: Any, i: Any) -> Any:
    if isinstance(moment, types.NoneType):
        return lambda moment, scale, i: np.float32(0)
    if isinstance(moment, types.BaseTuple):
        decode = decode_signed if moment[0].dtype == types.int8 else decode_positive
        return lambda moment, scale, i: decode(moment[0][i], scale)
    return lambda moment, scale, i: load(moment, i)


def store_moment(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> Any:
    """Write a moment; what is to be packed, to `staged`, as its scale is known when the whole group is."""


@overload_inline(store_moment)
def _store_moment(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> Any:
    if isinstance(moment, types.NoneType):
        return lambda moment, staged, i, value, random: None

    def store_positive(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> None:
        staged[i] = np.sqrt(value)  # which the update has computed already

    def store_signed(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> None:
        staged[i] = value

    def store_float(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> None:
        moment[i] = value

    def store_bf16(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> None:
        moment[i] = to_bf16(value)

    def store_random_bf16(moment: Any, staged: Any, i: Any, value: Any, random: Any) -> None:
        moment[i] = np.uint16(U32(plain_bits(value) + (random >> U32(16))) >> U32(16))  # or slow averages stand still

    if isinstance(moment, types.BaseTuple):
        return store_signed if moment[0].dtype == types.int8 else store_positive
    if moment.dtype == types.float32:
        return store_float
    return store_bf16 if isinstance(random, types.NoneType) else store_random_bf16


def pack(moment: Any, staged: Any, size: Any, key: Any) -> Any:
    """Write a group of staged values in codes."""


@overload_inline(pack)
def _pack(moment: Any, staged: Any, size: Any, key: Any) -> Any:
    if not isinstance(moment, types.BaseTuple):
        return lambda moment, staged, size, key: None
    encode, cast = (encode_signed, np.int8) if moment[0].dtype == types.int8 else (encode_positive, np.uint8)

    def pack_codes(moment: Any, staged: Any, size: Any, key: Any) -> Any:
        codes, scales = moment
        if size == GROUP:  # a constant, for which loops have no ends to take care of
            scales[0] = scale = largest(staged, GROUP)
            for i in range(GROUP):
                codes[i] = cast(encode(staged[i], scale, noise(key, i)))
        else:
            scales[0] = scale = largest(staged, size)
            for i in range(size):
                codes[i] = cast(encode(staged[i], scale, noise(key, i)))

    return pack_codes


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
    """Take a square root to one of 256 steps, at random up or down; from below the first one up: it is divided by."""
    factor = np.float32(256 * (1 - 2**-20)) / (scale if scale > 0 else np.float32(1))  # or some would round to 257
    below = np.float32(np.int32(noise)) * np.float32(2**-32) - np.float32(0.5)
    return np.int32(root * factor + below)  # -1 to 0 is cut to 0


@near
def decode_positive(code: Any, scale: Any) -> Any:
    """Undo `encode_positive`."""
    step = scale * np.float32(1 / 256)
    root = np.float32(code) * step + step
    return root * root
