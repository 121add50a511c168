"""The codecs by torch's operations, on any device: flat tensors in the formats of codecs.py, with its bits.

What lies in fp32 is handed out itself, to be updated in place; of what lies in fewer bytes there is a copy in fp32
meanwhile. Nothing waits for the device. NaN stays NaN, but which of its bits are set is not promised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import INFINITY, Memory, Scaling

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


def load_weight(weight: Tensor, low: Tensor | None, ties: Tensor | None) -> Tensor:
    """Return the master, where it lies or as a copy; the sign of `ties` tells how a tie was rounded, up without it."""
    if low is None:
        return weight.float()
    lower = low.view(torch.int16)  # negative if the upper half was rounded up
    master = weight.float()
    bits = master.view(torch.int32)
    if ties is None:
        return bits.add_(lower).view(torch.float32)
    at_tie = ties.signbit().logical_not_()
    return bits.add_(lower.add(at_tie, alpha=-1)).add_(at_tie).view(torch.float32)


def store_weight(memory: Memory, p: Tensor, has_sign: bool) -> Tensor | None:
    """Write a master. Return where it lay in the middle and was rounded up, if a sign bit is to tell."""
    if memory.low is None:
        if p is not memory.weight:
            memory.weight.copy_(p)
        return None
    # of every NaN the bits that `.bfloat16()` makes of it
    bits = p.masked_fill_(p != p, math.nan).view(torch.int32)
    memory.low.view(torch.int16).copy_(bits)
    if not has_sign:
        memory.weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        return None
    memory.weight.copy_(bits.view(torch.float32))
    return bits.bitwise_and_(0x1FFFF).eq_(0x18000)


def _noise(seed: int, begin: int, like: Tensor) -> Tensor:
    """Return what `noise` in codecs.py has for the elements from one on, with a sign."""
    key = (seed ^ 0x9E3779B9) & 0xFFFFFFFF
    key = (key ^ key >> 16) * 0x7FEB352D & 0xFFFFFFFF
    key = (key ^ key >> 15) * 0x846CA68B & 0xFFFFFFFF
    step = 0x9E3779B9
    first = (key ^ key >> 16) + begin * step & 0xFFFFFFFF
    numbers = torch.arange(first, first + like.numel() * step, step, dtype=torch.int64, device=like.device)
    return numbers.to(torch.int32)


# --------------------------------------------------------------------------------------------------------- the moments


# No bits are promised of what is in codes: how these divide, and what they join, the kernels leave to their compiler.


def unpack(moment: Tensor, scales: Tensor) -> Tensor:
    """Return what flat codes stand for, in fp32: they are of whole groups, or of one that is not whole."""
    value = moment.float()
    rows = value.view(len(scales), -1)
    if moment.dtype == torch.uint8:
        rows.add_(1).mul_(scales[:, None] / 256).square_()
    else:
        divisor = 254 - rows.abs()
        rows.mul_(scales[:, None]).div_(divisor)
    return value


def pack(moment: Tensor, scales: Tensor, value: Tensor, seed: int, begin: int) -> None:
    """Write a moment in codes: of whole groups, or of one that is not whole. Its value is overwritten."""
    rows, codes = value.view(len(scales), -1), moment.view(len(scales), -1)
    if moment.dtype == torch.uint8:
        rows.sqrt_()
        torch.amax(rows, 1, out=scales)
        # or some would round to 257
        factor = torch.full_like(scales, 256 * (1 - 2**-20)).div_(scales.masked_fill(scales == 0, 1))
        below = _noise(seed, begin, value).float().mul_(2**-32).sub_(0.5)
        codes.copy_(below.view_as(rows).addcmul_(rows, factor[:, None]))  # -1 to 0 is cut to 0
    else:
        divisor = rows.abs()
        torch.amax(divisor, 1, out=scales)
        divisor.add_(scales.masked_fill(scales == 0, 1)[:, None])
        codes.copy_(torch.mul(rows, 254).div_(divisor).round_())


# -------------------------------------------------------------------------------------------------------------- ranges


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def groups_in(begin: int, end: int) -> slice:
    """Return the groups of codes in a range, which begins where one does."""
    return slice(begin // GROUP, math.ceil(end / GROUP))


def whole_and_rest(size: int, count: int) -> list[tuple[int, int]]:
    """Return the range of elements that are whole ones of so many, and that of the rest, if there are any."""
    rest = size % count
    return [(begin, end) for begin, end in ((0, size - rest), (size - rest, size)) if begin < end]
