"""One pass over host memory for an optimizer's step, compiled by numba: gradient in, weight and state out.

    gradient -> fp32 -> scale, clip -> `update`: weight, moments -> codecs -> memory, and a bf16 copy of the weight

`step_shares` is compiled for each kind of optimizer and of memory that it meets, and kept on disk. It steps any number
of weights, on several threads: it is called once for all weights of a unit, because each time that it takes or gives
back Python's lock, the thread that launches kernels may have to wait. What is one number in fp32 arithmetic lies in
memory as one of these, and the type of what is passed says which:

    weight   fp32 array | bf16 bits | (bf16 bits, low 16 or 8 bits), together the fp32 master or its upper 24 bits
    moment   None | fp32 array | bf16 bits | (int8 or uint8 codes, fp32 scale for each `GROUP` of them)
    lowered  None | bf16 bits to write

The cache on disk looks at the file of a kernel only; `sources` has it compile again when the codecs have changed.

[Note: bits] `update` has the bits of torch's fused CPU kernels. `fma` stands where their compiler contracts; the
elements that are left over at the end of a tensor (`tail`) are compiled another way. `tests/optim` tries it.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit, prange, types
from numba.core import event
from numba.extending import intrinsic

from sp_lightning.optim.codecs import (
    U32,
    bits_of,
    float_of,
    fma,
    jit,
    key_of,
    load,
    load_weight,
    near,
    noise,
    overload_inline,
    pack,
    space,
    staged,
    store_weight,
    to_bf16,
    unpack,
)
from sp_lightning.optim.layout import BLOCK, GROUP
from sp_lightning.optim.rules import AdamRule, LionRule, SgdRule

_LOG = logging.getLogger(__name__)
LANES = 8
"""Torch's fused kernels work on so many elements at once, in bf16 on twice as many."""


_SOURCES = zlib.crc32(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("codecs.py", "layout.py", "rules.py"))
)


def rounded(g: Any, in_bf16: Any) -> Any:
    """Round to bf16, unless `in_bf16` is None."""


@overload_inline(rounded)
def _rounded(g: Any, in_bf16: Any) -> Any:
    if isinstance(in_bf16, types.NoneType):
        return lambda g, in_bf16: g
    return lambda g, in_bf16: float_of(U32(U32(to_bf16(g)) << U32(16)))


@jit
def scaled(g: Any, scaling: Any) -> Any:
    """Scale and clip a gradient, each operation rounded by itself, as torch does in passes of their own."""
    g = rounded(rounded(g * scaling.factor, scaling.in_bf16) * scaling.then, scaling.in_bf16)
    g = scaling.limit if g > scaling.limit else g
    return -scaling.limit if g < -scaling.limit else g


# --------------------------------------------------------------------------------------------------- rules of updates


def update(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool, second: Any) -> Any:
    """Return a weight and its two moments after a step, from those before it and the gradient; all in fp32.

    The bits are promised unless the second moment is kept in codes.
    """


@jit
def _adam(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool) -> Any:
    if rule.penalty != 0:
        g = fma(p, rule.penalty, g)
    p = p * rule.decay
    from_m = rule.first_rate < np.float32(0.5)
    m = fma(rule.first_rate if from_m else rule.first_rate - np.float32(1), g - m, m if from_m else g)
    if tail:
        v = fma(v, rule.second_decay, rule.second_rate * g * g)
    else:
        v = fma(rule.second_rate * g, g, v * rule.second_decay)
    return p - rule.step_size * m / (np.sqrt(v) / rule.correction + rule.eps), m, v


@jit
def _sgd(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool) -> Any:
    if rule.penalty != 0:
        g = fma(p, rule.penalty, g)
    if rule.is_first_step:
        m = g
    elif tail:
        m = fma(m, rule.momentum, g * rule.rate)
    else:
        m = fma(g, rule.rate, m * rule.momentum)
    if rule.nesterov:
        g = fma(m, rule.momentum, g)
    elif rule.momentum != 0:
        g = m
    return fma(g, -rule.lr, p), m, v


@jit
def _lion(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool) -> Any:
    direction = m * rule.beta1 + g * rule.rate1
    step = rule.lr if direction > 0 else (-rule.lr if direction < 0 else direction)  # NaN stays NaN
    return p * rule.decay - step, m * rule.beta2 + g * rule.rate2, v


_UPDATES = {AdamRule: _adam, SgdRule: _sgd, LionRule: _lion}


@overload_inline(update)
def _update(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool, second: Any) -> Any:
    of_kind = _UPDATES[rule.instance_class]
    if isinstance(second, types.BaseTuple):
        of_kind = near(of_kind.py_func)
    return lambda rule, p, g, m, v, tail, second: of_kind(rule, p, g, m, v, tail)


# ----------------------------------------------------------------------------------------------------------- the pass


def keeps_sign(moment: Any) -> Any:
    """Return 1 if a second moment has a sign bit to keep a tie in, see [Note: ties]."""


@overload_inline(keeps_sign)
def _keeps_sign(moment: Any) -> Any:
    answer = U32(isinstance(moment, types.Array))
    return lambda moment: answer


def part(memory: Any, start: Any, stop: Any) -> Any:
    """Return a part of an array, if there is one."""


@overload_inline(part)
def _part(memory: Any, start: Any, stop: Any) -> Any:
    if isinstance(memory, types.NoneType):
        return lambda memory, start, stop: None
    return lambda memory, start, stop: memory[start:stop]


@jit
def _update_part(
    rule: Any, weight: Any, low: Any, gradient: Any, m: Any, v: Any, lowered: Any, scaling: Any, has_sign: Any,
    tail: Any, seed: Any, offset: Any, moment: Any,
) -> Any:  # fmt: skip
    key, sign = key_of(seed, 0, offset), U32(has_sign << U32(31))
    for i in range(len(gradient)):
        g = scaled(load(gradient, i), scaling)
        bits = bits_of(v[i])
        p = load_weight(weight, low, i, (bits & sign) >> U32(31))
        p, first, second = update(rule, p, g, m[i], float_of(U32(bits & ~sign)), tail, moment)
        m[i] = first
        up = store_weight(weight, low, lowered, i, p, has_sign, noise(key, i))
        v[i] = float_of(U32(bits_of(staged(moment, second)) | U32(up << U32(31))))


@njit(nogil=True, error_model="numpy")  # not inlined, or it would be compiled twice: for one thread and for several
def step_range(
    rule: Any, weight: Any, low: Any, gradient: Any, first: Any, second: Any, lowered: Any, scaling: Any, seed: Any,
    offset: Any,
) -> None:  # fmt: skip
    """Step a range of a weight. See the top of the module for what may be passed; all arrays are flat.

    Args:
        rule: The numbers of the update.
        weight: The masters to update, or their upper halves.
        low: Their low bits, or None.
        gradient: Their gradient, fp32 or the bits of bf16; it is not changed.
        first: The first moment, or momentum.
        second: The second moment.
        lowered: Where the bf16 copy goes, or None.
        scaling: What is done to the gradient before.
        seed: Of random rounding, another one for each step; None for rounding to the nearest.
        offset: Where the range begins in its tensor: at a multiple of `BLOCK`.
    """
    size = len(gradient)
    body = size - size % (2 * LANES if weight.itemsize == 2 and low is None else LANES)
    m_space, v_space, has_sign = space(first), space(second), keeps_sign(second)
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        m, v = unpack(first, start, stop, m_space), unpack(second, start, stop, v_space)
        for begin, end, tail in ((start, min(stop, body), False), (min(stop, body), stop, True)):
            _update_part(
                rule, part(weight, begin, end), part(low, begin, end), part(gradient, begin, end),
                m[begin - start : end - start], v[begin - start : end - start], part(lowered, begin, end),
                scaling, has_sign, tail, seed, offset + begin, second,
            )  # fmt: skip
        pack(first, start, stop, m, seed, 0x55555555, offset)
        pack(second, start, stop, v, seed, 0x33333333, offset)


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """Return a pointer to what an array like this one has."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), generate


def memory_at(addresses: Any, start: Any, stop: Any, like: Any) -> Any:
    """Return a range of the memory at an address, as something like this; the second address is that of scales."""


@overload_inline(memory_at)
def _memory_at(addresses: Any, start: Any, stop: Any, like: Any) -> Any:
    if isinstance(like, types.NoneType):
        return lambda addresses, start, stop, like: None
    if isinstance(like, types.BaseTuple):
        return lambda addresses, start, stop, like: (
            carray(_pointer(addresses[0], like[0]), stop)[start:stop],
            carray(_pointer(addresses[1], like[1]), -(-stop // GROUP))[start // GROUP :],
        )
    return lambda addresses, start, stop, like: carray(_pointer(addresses[0], like), stop)[start:stop]


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def step_shares(
    rule: Any, kinds: Any, addresses: Any, ranges: Any, begins: Any, scaling: Any, seed: Any, sources: int = _SOURCES
) -> None:
    """Step weights, of which each thread has a share.

    Args:
        rule: The numbers of the update.
        kinds: Empty memory of the kinds that the weights have: of masters, low bits, gradients, both moments, copies.
        addresses: A row for each weight: two addresses for each of these.
        ranges: A row for each range: the number of its weight, where it begins in it, where it ends.
        begins: The number of the first range of each share, and of all.
        scaling: What is done to gradients before.
        seed: Of random rounding, another one for each step; None for rounding to the nearest.
        sources: Not to be passed.
    """
    weight, low, gradient, first, second, lowered = kinds
    for share in prange(len(begins) - 1):
        for number in range(begins[share], begins[share + 1]):
            of, start, stop = ranges[number]
            at = addresses[of]
            step_range(
                rule, memory_at(at[0:2], start, stop, weight), memory_at(at[2:4], start, stop, low),
                memory_at(at[4:6], start, stop, gradient), memory_at(at[6:8], start, stop, first),
                memory_at(at[8:10], start, stop, second), memory_at(at[10:12], start, stop, lowered),
                scaling, seed, start,
            )  # fmt: skip


class _Narrator(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says when the kernel is compiled, as that takes seconds: not if it is found on disk."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is step_shares:
            # a warning: nothing less is shown where nobody has set up logging
            rule = event.data["args"][0].instance_class.__name__
            _LOG.warning("sp_lightning.optim compiles its step for %s: some seconds, once on this machine", rule)

    def on_end(self, event: Any) -> None:
        """Say nothing."""


event.register("numba:compile", _Narrator())


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def add_bits(total: Any, gradient: Any, sources: int = _SOURCES) -> None:
    """Add the bits of a bf16 gradient to an fp32 sum."""
    for i in prange(len(total)):
        total[i] += load(gradient, i)


@njit(nogil=True, error_model="numpy", cache=True)
def read_moment(moment: Any, values: Any, sources: int = _SOURCES) -> None:
    """Unpack a whole moment into fp32."""
    unpack(moment, 0, len(values), values)


@njit(nogil=True, error_model="numpy", cache=True)
def write_moment(moment: Any, values: Any, sources: int = _SOURCES) -> None:
    """Pack a whole moment from fp32."""
    block = np.empty_like(values)
    for i in range(len(values)):
        block[i] = staged(moment, values[i])
    pack(moment, 0, len(values), block, 0, 0, 0)
