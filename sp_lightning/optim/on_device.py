"""A pass by torch's operations, for weights on an accelerator: the formats and rules of the kernels, and their bits.

[Note: operations] On the CPU and on CUDA these round once, as the kernels' `fma` does:

    a.add(b, alpha=c)    a + c * b
    a.addcmul(b, c)      a + b * c; without a value, by which CUDA multiplies the rounded product
    a.lerp(b, c)         a + c * (b - a), and from c = 0.5 on b - (1 - c) * (b - a)

Others stand where the kernels round each operation by itself. `addcdiv` rounds in a way of its own. CUDA multiplies by
the inverse of a number instead of dividing by it, so a divisor is a tensor. MKL's square root, which torch has on the
CPU, is not the nearest number in fp32.

How weights and moments lie in fewer bytes is in formats.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_lightning.optim.formats import (
    flat,
    groups_in,
    load_moment,
    load_weight,
    pack,
    scaled,
    store_weight,
    whole_and_rest,
)
from sp_lightning.optim.layout import GROUP, LANES
from sp_lightning.optim.rules import ADAM, Kind, Memory, Pass, Rule

PIECE = 1 << 23
"""Elements that are stepped at once, a multiple of `BLOCK`."""

BYTES_MEANWHILE = 24
"""What each of them takes of the device's memory at most, while it is stepped."""


def step_on_device(step: Pass) -> None:
    """Run a pass over a whole weight, in pieces."""
    whole = Memory(*[None if tensor is None else flat(tensor) for tensor in step.memory])
    size = whole.weight.numel()
    for begin in range(0, size, PIECE):
        step_range(step._replace(memory=_part_of(whole, begin, min(begin + PIECE, size))), begin)


@torch.no_grad()
def step_range(step: Pass, begin: int = 0) -> None:
    """Run a pass over a range of a weight.

    Args:
        step: Its memory is that of the range alone: flat tensors on one device. A factor of its scaling may be a tensor
            of one element in fp32 there.
        begin: The first element of the range, a multiple of `BLOCK`. So is its end, unless it is the weight's, where
            the kernels compile what is left over after whole vectors in another way.
    """
    kind = step.kind
    lanes = 2 * LANES if kind.weight == 2 and kind.low == 0 else LANES
    is_coded = kind.first == 1
    together = GROUP if is_coded else lanes
    for start, end in whole_and_rest(step.memory.weight.numel(), together):
        is_tail = end - start < together and not is_coded
        _step(step, _part_of(step.memory, start, end), begin + start, is_tail)


def _part_of(memory: Memory, begin: int, end: int) -> Memory:
    """Return the part of flat memory that is a range's; of codes, it begins where a group does."""
    groups = groups_in(begin, end)
    tensors = [None if tensor is None else tensor[begin:end] for tensor in memory[:6]]
    scales = [None if tensor is None else tensor[groups] for tensor in memory[6:]]
    return Memory(*tensors, *scales)


def _step(step: Pass, memory: Memory, begin: int, tail: bool) -> None:
    kind = step.kind
    has_sign = kind.second > 1  # to keep a tie in, see [Note: ties] in codecs.py
    has_ties = has_sign and kind.low == 2
    g = scaled(memory.gradient, step.scaling, kind.weight == 2 and kind.gradient == 2)
    m = load_moment(memory.first, memory.first_scale)
    v = load_moment(memory.second, memory.second_scale)
    p = load_weight(memory.weight, memory.low, v if has_ties else None)
    if has_ties:
        v.abs_()
    rule = Rule(kind.update, *map(float, step.rule[1:]))  # what numpy has are no numbers for torch
    p, v = _update(kind, rule, p, g, m, v, tail)
    if memory.copy is not None:
        memory.copy.copy_(p)
    up = store_weight(memory, p, has_sign)
    if up is not None:
        v.view(torch.int32).add_(up, alpha=-(1 << 31))
    for moment, scale, value in ((memory.first, memory.first_scale, m), (memory.second, memory.second_scale, v)):
        if scale is not None:
            pack(moment, scale, value, step.seed, begin)
        elif moment is not None and moment.dtype == torch.bfloat16:
            moment.copy_(value)


# --------------------------------------------------------------------------------------------------- rules of updates


def _update(kind: Kind, rule: Rule, p: Tensor, g: Tensor, m: Tensor, v: Tensor, tail: bool) -> tuple[Tensor, Tensor]:
    """Return a weight and its second moment, or the root of one in codes; all moments are updated in place."""
    if kind.is_penalized:
        g = g.add(p, alpha=rule.penalty)
    if kind.update == ADAM:
        return _adam(rule, p, g, m, v, tail, kind.second == 1)
    if kind.first > 0:
        _momentum(rule, g, m, tail)
        g = m
    return p.add_(g, alpha=-rule.lr), v


def _momentum(rule: Rule, g: Tensor, m: Tensor, tail: bool) -> None:
    if tail:
        m.copy_((g * rule.first_rate).add_(m, alpha=rule.first_decay))
    else:
        m.mul_(rule.first_decay).add_(g, alpha=rule.first_rate)


def _adam(rule: Rule, p: Tensor, g: Tensor, m: Tensor, v: Tensor, tail: bool, is_near: bool) -> tuple[Tensor, Tensor]:
    m.lerp_(g, rule.first_rate)
    rated = g * rule.second_rate
    if tail:
        v.copy_(rated.mul_(g).add_(v, alpha=rule.second_decay))
    else:
        v.mul_(rule.second_decay).addcmul_(rated, g)
    root = _root(v)
    if is_near:
        divisor = torch.add(_number(rule.eps, v), root, alpha=1 / rule.correction, out=v)
        return torch.mul(m, -rule.lr, out=rated).div_(divisor).add_(p, alpha=rule.decay), root
    divisor = root.div_(_number(rule.correction, v)).add_(rule.eps)
    return p.mul_(rule.decay).sub_(torch.mul(m, rule.lr, out=rated).div_(divisor)), v


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _root(v: Tensor) -> Tensor:
    if v.device.type == "cpu":
        return v.double().sqrt_().float()
    return v.sqrt()
