"""The codecs by torch's operations, on any device: flat tensors in the formats of codecs.py, with its bits.

What lies in fp32 is handed out itself, to be updated in place; of what lies in fewer bytes there is a copy in fp32
meanwhile. Nothing waits for the device. NaN stays NaN, but which of its bits are set is not promised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_lightning.optim.rules import INFINITY, Kind, Memory, Scaling

# ------------------------------------------------------------------------------------------ gradients and masters


def scaled(gradient: Tensor, scaling: Scaling, in_bf16: bool) -> Tensor:
    """Return a gradient in fp32, scaled and clipped; it may be the one given, which is only read."""
    g = gradient.float()
    for factor in (scaling.factor, scaling.then):
        if isinstance(factor, Tensor) or factor != 1:
            g = g * (factor if isinstance(factor, Tensor) else float(factor))
            g = g.bfloat16().float() if in_bf16 else g
    if scaling.limit != INFINITY:
        g = g.clamp(-float(scaling.limit), float(scaling.limit))
    return g


def load_weight(kind: Kind, memory: Memory, ties: Tensor | None) -> Tensor:
    """Return the master, where it lies or as a copy; the sign of `ties` tells how a tie was rounded, up without it."""
    if kind.low == 4:
        master: Tensor = memory.low
        return master
    p: Tensor = memory.weight.float()
    if kind.low == 0:
        return p
    bits = p.view(torch.int32)
    low = memory.low.view(torch.int16) if kind.low == 2 else _widened(memory.low)
    if ties is None:
        bits.add_(low)
    else:
        at_tie = ties.view(torch.int32) >= 0
        bits.add_(low.add(at_tie, alpha=-1)).add_(at_tie)  # negative if it was rounded up
    return p


def _widened(low: Tensor) -> Tensor:
    return low.view(torch.int8).to(torch.int16).mul_(256)


def store_weight(kind: Kind, memory: Memory, p: Tensor, has_sign: bool, seed: int, begin: int) -> Tensor | None:
    """Write a master. Return where it lay in the middle and was rounded up, if a sign bit is to tell."""
    if kind.low == 4 and p is not memory.low:
        memory.low.copy_(p)
    if kind.low in (0, 4):
        if p is not memory.weight:
            memory.weight.copy_(p)
        return None
    bits = _plain_bits(p)
    if kind.low == 1:
        bits.add_(_noise(seed, begin, p, 8)).bitwise_and_(-256)
        memory.low.view(torch.int8).copy_(bits >> 8)
    else:
        memory.low.view(torch.int16).copy_(bits)
    if not has_sign:
        memory.weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        return None
    memory.weight.copy_(bits.view(torch.float32))
    return bits.bitwise_and_(0x1FFFF).eq_(0x18000)


def _plain_bits(values: Tensor) -> Tensor:
    """Return the bits of floats, which share their memory; noise that is added to these does not turn NaN into 0."""
    return values.masked_fill_(values != values, math.nan).view(torch.int32)


def _noise(seed: int, begin: int, like: Tensor, bits: int) -> Tensor:
    """Return so many upper bits of what `noise` in codecs.py has for the elements from one on; with 32, of any sign."""
    key = (seed ^ 0x9E3779B9) & 0xFFFFFFFF
    key = (key ^ key >> 16) * 0x7FEB352D & 0xFFFFFFFF
    key = (key ^ key >> 15) * 0x846CA68B & 0xFFFFFFFF
    key = (key ^ key >> 16) + begin * 0x9E3779B9 & 0xFFFFFFFF
    numbers = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    numbers.mul_(0x9E3779B9 - (1 << 32)).add_(key if key < 1 << 31 else key - (1 << 32))
    if bits == 32:
        return numbers
    return numbers.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


# --------------------------------------------------------------------------------------------------------- the moments


def load_moment(moment: Tensor | None, scales: Tensor | None) -> Tensor:
    """Return a moment in fp32, where it lies or as a copy; one that an optimizer has not is empty."""
    if moment is None:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return moment.float() if scales is None else unpack(moment, scales)


def store_moment(moment: Tensor, value: Tensor, seed: int | None, begin: int) -> None:
    """Write a moment in bf16, rounded at random or to the nearest; in fp32 it lies there."""
    if moment.dtype == torch.float32:
        return
    if seed is None:
        moment.copy_(value)
    else:
        bits = _plain_bits(value).add_(_noise(seed, begin, value, 16))
        moment.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


# No bits are promised of what is in codes: how these divide, and what they join, the kernels leave to their compiler.


def unpack(moment: Tensor, scales: Tensor) -> Tensor:
    """Undo what `pack` does."""
    value = moment.float()
    rows = value.view(len(scales), -1)
    if moment.dtype == torch.uint8:
        rows.add_(1).mul_(scales[:, None] / 256).square_()
    else:
        divisor = 254 - rows.abs()
        rows.mul_(scales[:, None]).div_(divisor)
    return value


def pack(moment: Tensor, scales: Tensor, value: Tensor, seed: int, begin: int) -> None:
    """Write first moments, or the roots of second ones, in codes: whole groups, or what is no whole group by itself."""
    rows, codes = value.view(len(scales), -1), moment.view(len(scales), -1)
    if moment.dtype == torch.uint8:
        torch.amax(rows, 1, out=scales)
        factor = 256 * (1 - 2**-20) / scales.masked_fill(scales == 0, 1)
        below = _noise(seed, begin, value, 32).float().mul_(2**-32).sub_(0.5)
        codes.copy_(below.view_as(rows).addcmul_(rows, factor[:, None]))  # -1 to 0 is cut to 0
    else:
        divisor = rows.abs()
        torch.amax(divisor, 1, out=scales)
        divisor.add_(scales.masked_fill(scales == 0, 1)[:, None])
        codes.copy_(torch.mul(rows, 254).div_(divisor).round_())
