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
    is_packed,
    jit,
    key_of,
    load,
    load_moment,
    load_weight,
    near,
    noise,
    overload_inline,
    pack,
    scale_of,
    space,
    store_moment,
    store_weight,
    to_bf16,
)
from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import AdamRule, LionRule, SgdRule

_LOG = logging.getLogger(__name__)
LANES = 8
"""Torch's fused kernels work on so many elements at once, in bf16 on twice as many."""


_SOURCES = zlib.crc32(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("codecs.py", "layout.py", "rules.py"))
)


def times(g: Any, factor: Any, in_bf16: Any) -> Any:
    """Multiply by a factor, if there is one, and round to bf16, unless `in_bf16` is None."""


@overload_inline(times)
def _times(g: Any, factor: Any, in_bf16: Any) -> Any:
    if isinstance(factor, types.NoneType):
        return lambda g, factor, in_bf16: g
    if isinstance(in_bf16, types.NoneType):
        return lambda g, factor, in_bf16: g * factor
    return lambda g, factor, in_bf16: float_of(U32(U32(to_bf16(g * factor)) << U32(16)))


def clipped(g: Any, limit: Any) -> Any:
    """Clip by value, if there is a limit."""


@overload_inline(clipped)
def _clipped(g: Any, limit: Any) -> Any:
    if isinstance(limit, types.NoneType):
        return lambda g, limit: g
    return lambda g, limit: limit if g > limit else (-limit if g < -limit else g)


@jit
def scaled(g: Any, scaling: Any) -> Any:
    """Scale and clip a gradient, each operation rounded by itself, as torch does in passes of their own."""
    g = times(times(g, scaling.factor, scaling.in_bf16), scaling.then, scaling.in_bf16)
    return clipped(g, scaling.limit)


# --------------------------------------------------------------------------------------------------- rules of updates


def update(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool, second: Any) -> Any:
    """Return a weight and its two moments after a step, from those before it and the gradient; all in fp32.

    The bits are promised unless the second moment is kept in codes.
    """


def penalized(g: Any, p: Any, penalty: Any) -> Any:
    """Add a part of the weight to the gradient, if there is a penalty."""


@overload_inline(penalized)
def _penalized(g: Any, p: Any, penalty: Any) -> Any:
    if isinstance(penalty, types.NoneType):
        return lambda g, p, penalty: g
    return lambda g, p, penalty: fma(p, penalty, g)


@jit
def _adam(rule: Any, p: Any, g: Any, m: Any, v: Any, tail: bool) -> Any:
    g = penalized(g, p, rule.penalty)
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
    g = penalized(g, p, rule.penalty)
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
        return lambda rule, p, g, m, v, tail, second: of_kind(rule, p, g, m, v, False)
    return lambda rule, p, g, m, v, tail, second: of_kind(rule, p, g, m, v, tail)


# ----------------------------------------------------------------------------------------------------------- the pass


def keeps_sign(moment: Any) -> Any:
    """Return 1 if a second moment has a sign bit to keep a tie in, see [Note: ties]."""


@overload_inline(keeps_sign)
def _keeps_sign(moment: Any) -> Any:
    answer = U32(isinstance(moment, types.Array))
    return lambda moment: answer


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """Return a pointer to what an array like this one has."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), generate


@jit
def _array_at(address: Any, start: Any, size: Any, like: Any) -> Any:
    return carray(_pointer(address + start * like.itemsize, like), size)


def memory_at(addresses: Any, kind: Any, start: Any, size: Any, like: Any) -> Any:
    """Return the part of a weight's memory of a kind that begins at an element, as something like this."""


@overload_inline(memory_at)
def _memory_at(addresses: Any, kind: Any, start: Any, size: Any, like: Any) -> Any:
    if isinstance(like, types.NoneType):
        return lambda addresses, kind, start, size, like: None
    if isinstance(like, types.BaseTuple):
        return lambda addresses, kind, start, size, like: (
            _array_at(addresses[2 * kind], start, size, like[0]),
            _array_at(addresses[2 * kind + 1], start // GROUP, 1, like[1]),
        )
    return lambda addresses, kind, start, size, like: _array_at(addresses[2 * kind], start, size, like)


@jit
def _step_block(
    rule: Any, weight: Any, low: Any, gradient: Any, first: Any, second: Any, lowered: Any, scaling: Any, tail: Any,
    seed: Any, start: Any, size: Any,
) -> None:  # fmt: skip
    has_sign = keeps_sign(second)
    sign = U32(has_sign << U32(31))
    keys = key_of(seed, 0, start), key_of(seed, 0x55555555, start), key_of(seed, 0x33333333, start)
    m_scale, v_scale, ms, vs = scale_of(first), scale_of(second), space(), space()
    for i in range(size):
        g = scaled(load(gradient, i), scaling)
        m, bits = load_moment(first, m_scale, i), bits_of(load_moment(second, v_scale, i))
        p = load_weight(weight, low, i, U32((bits & sign) >> U32(31)) if has_sign else U32(1))
        p, m, v = update(rule, p, g, m, float_of(U32(bits & ~sign)), tail, second)
        up = store_weight(weight, low, lowered, i, p, has_sign, noise(keys[0], i))
        store_moment(first, ms, i, m, noise(keys[1], i))
        store_moment(second, vs, i, float_of(U32(bits_of(v) | U32(up << U32(31)))), noise(keys[2], i))
    pack(first, ms, size, keys[1])
    pack(second, vs, size, keys[2])


@njit(nogil=True, error_model="numpy")  # not inlined, or it would be compiled twice: for one thread and for several
def _step_range(rule: Any, kinds: Any, addresses: Any, begin: Any, end: Any, scaling: Any, seed: Any) -> None:
    """Step a range in blocks: groups of codes, or whole vectors and the elements that are left over."""
    weight, low, gradient, first, second, lowered = kinds
    tail = end - (end - begin) % (2 * LANES if weight.itemsize == 2 and low is None else LANES)
    block = tail - begin if tail > begin else end - begin
    if is_packed(first):
        tail, block = end, GROUP
    for start in range(begin, end, block):
        size = min(block, end - start)
        _step_block(
            rule, memory_at(addresses, 0, start, size, weight), memory_at(addresses, 1, start, size, low),
            memory_at(addresses, 2, start, size, gradient), memory_at(addresses, 3, start, size, first),
            memory_at(addresses, 4, start, size, second), memory_at(addresses, 5, start, size, lowered),
            scaling, start == tail, seed, start, size,
        )  # fmt: skip


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
    weight, low, gradient, first, second, lowered = kinds  # as threads are handed no tuple of tuples
    for share in prange(len(begins) - 1):
        for number in range(begins[share], begins[share + 1]):
            of, start, stop = ranges[number]
            parts = weight, low, gradient, first, second, lowered
            _step_range(rule, parts, addresses[of], start, stop, scaling, seed)


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
    for i in range(len(values)):
        values[i] = load_moment(moment, moment[1][i // GROUP], i)


@njit(nogil=True, error_model="numpy", cache=True)
def write_moment(moment: Any, values: Any, sources: int = _SOURCES) -> None:
    """Pack a whole moment from fp32."""
    staged = space()
    for start in range(0, len(values), GROUP):
        part = values[start : start + GROUP]
        for i in range(len(part)):
            store_moment(moment, staged, i, part[i], U32(0))
        pack((moment[0][start:], moment[1][start // GROUP :]), staged, len(part), key_of(0, 0, start))
