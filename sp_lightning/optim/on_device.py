"""A pass by torch's operations, for weights on an accelerator, in the formats of codecs.py.

Tensors in fp32 are updated in place; tensors in fewer bytes have a copy in fp32 meanwhile. The update itself is torch's
own code, so it rounds as plain training does there, unless all operations are one kernel (one_kernel.py). The host
never waits for the device. NaN stays NaN, but which of its bits are set is not promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.layout import GROUP, LARGEST_FIRST, LARGEST_SECOND, flat
from sp_lightning.optim.one_kernel import compile_kernel, is_possible, layout_of, run_as_one_kernel
from sp_lightning.optim.rules import Memory, Pass, Scaling

PIECE = 1 << 23
"""Elements that are stepped at once, a multiple of `BLOCK`."""

BYTES_MEANWHILE = 24
"""The most bytes of the device's memory that each of these elements takes while it is stepped."""


def bytes_of_step(numbers: int) -> int:
    """Return the bytes of device memory that a step of these elements takes, besides its inputs and results."""
    return BYTES_MEANWHILE * min(PIECE, numbers)


_SPREADS = 0x9E3779B9 - (1 << 32)  # see `codecs.noise`; signed


class Effort(NamedTuple):
    """The costs of a pass on a device.

    Attributes:
        kernels: Number of kernels that it launches, one after the other.
        nbytes: Bytes of the device's memory that these read and write for each element.
    """

    kernels: int
    nbytes: int

    @classmethod
    def of(cls, has_halves: bool, has_codes: bool) -> Effort:
        """Return the effort for masters in one tensor or in two halves, and for moments in fp32 or in codes.

        The gradient is in bf16 and scaled once, as if clipped, and the new weights are put in their place. Masters and
        moments in plain fp32 may belong to torch's own optimizer, and count as if they did.
        """
        if is_possible() and (has_halves or has_codes):
            nbytes = 19 if has_codes else 30
            return cls(2, nbytes if has_halves else 21)
        if has_codes:
            return cls(57, 399) if has_halves else cls(43, 277)
        return cls(27, 215) if has_halves else cls(7, 52)


@torch.no_grad()
def step_on_device(step: Pass) -> None:
    """Run a pass, in pieces: first over whole groups of codes, then over the rest."""
    size = step.memory.weight.numel()
    whole = size - size % GROUP
    for begin, end in ((0, whole), (whole, size)):
        for start in range(begin, end, PIECE):
            _step(step._replace(memory=part_of(step.memory, start, min(start + PIECE, end))))


def together(steps: Sequence[Pass]) -> list[Pass]:
    """Return passes over neighbors as one, with the same bits, as long as these are no more than a piece.

    Next to kernels that compute, each kernel waits for its turn, so few are better.
    """
    rows: list[list[Pass]] = []
    joined = 0  # elements of the last row
    for step in steps:
        size = step.memory.weight.numel()
        if size == 0:  # there is nothing to do, and no memory with neighbors
            continue
        if rows and joined + size <= PIECE and _goes_on(rows[-1][-1], step):
            rows[-1].append(step)
            joined += size
        else:
            rows.append([step])
            joined = size
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _goes_on(last: Pass, step: Pass) -> bool:
    """Tell whether a pass continues the last one: the same update, in memory (except for gradients) right behind it."""
    is_alike = (last.update, last.step, last.scaling) == (step.update, step.step, step.scaling)
    if not is_alike or last.group is not step.group:
        return False
    before, after = last.memory, step.memory
    # all groups of codes are whole, and belong to one weight
    has_codes = before.first_scale is not None
    if has_codes and any(memory.weight.numel() % GROUP for memory in (before, after)):
        return False
    if before.gradient.dtype != after.gradient.dtype:
        return False
    pairs = zip(before._replace(gradient=None), after._replace(gradient=None), strict=True)
    return all(_is_neighbor(one, other) for one, other in pairs)


def _is_neighbor(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    # an allocator may put separate tensors one behind the other
    is_one_piece = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return is_one_piece and one.dtype == other.dtype and one.data_ptr() + one.nbytes == other.data_ptr()


def _joined(row: Sequence[Pass]) -> Pass:
    """Return one pass over all of these, which are one behind the other in memory."""
    gradient = torch.cat([flat(step.memory.gradient) for step in row])
    in_place = zip(*[step.memory._replace(gradient=None) for step in row], strict=True)
    whole = [
        None if tensors[0] is None else tensors[0].as_strided((sum(map(Tensor.numel, tensors)),), (1,))
        for tensors in in_place
    ]
    return row[0]._replace(memory=Memory(*whole)._replace(gradient=gradient))


def part_of(memory: Memory, begin: int, end: int) -> Memory:
    """Return the part of memory of a range, flat; in codes, the range begins with a group."""
    groups = slice(begin // GROUP, math.ceil(end / GROUP))
    tensors = [None if tensor is None else flat(tensor)[begin:end] for tensor in memory[:6]]
    scales = [None if tensor is None else tensor[groups] for tensor in memory[6:]]
    return Memory(*tensors, *scales)


def compile_for(steps: Sequence[Pass]) -> None:
    """Compile kernels for passes on a device, where these are one kernel each."""
    for layout in {layout_of(step) for step in steps if _may_be_compiled(step)}:
        compile_kernel(operate, layout)


def _may_be_compiled(step: Pass) -> bool:
    # torch's optimizers keep torch's bits; an update of one moment is a few operations anyway
    is_worth_it = "moments" in step.group and step.update.moments == 2
    return is_worth_it and step.memory.weight.numel() >= GROUP


def _step(step: Pass) -> None:
    """Run a pass over whole groups, or over a rest, which is less than a group."""
    seed = torch.tensor(step.seed - (1 << 31), dtype=torch.int32, device="cpu")
    if _may_be_compiled(step) and run_as_one_kernel(step, seed):
        return
    update = partial(step.update.by_torch, step.group, step.step)
    operate(step.memory, step.scaling, update, seed)


def operate(memory: Memory, scaling: Scaling, update: Callable[..., None], seed: Tensor) -> None:
    """Read a piece, update its weights and moments in place, in fp32, and write it."""
    weight = memory.weight
    in_bf16 = weight.dtype == memory.gradient.dtype == torch.bfloat16
    gradient = scaled(memory.gradient, scaling, in_bf16)
    kept = [(memory.first, memory.first_scale), (memory.second, memory.second_scale)]
    kept = kept[: 1 if memory.second is None else 2]
    moments = [moment.float() if scales is None else unpack(moment, scales) for moment, scales in kept]
    # see [Note: ties] in codecs.py
    has_ties = memory.low is not None and memory.second is not None and memory.second_scale is None
    master = load_weight(weight, memory.low, moments[-1] if has_ties else None)
    if has_ties:
        moments[-1].abs_()
    update(master, gradient, *moments)
    del gradient  # its memory is needed, see BYTES_MEANWHILE
    if memory.copy is not None:
        memory.copy.copy_(master)
    was_up = store_weight(memory, master, has_ties)
    if was_up is not None:
        moments[-1].view(torch.int32).add_(was_up, alpha=-(1 << 31))
    for (moment, scales), value in zip(kept, moments, strict=True):
        if scales is not None:
            largest = LARGEST_SECOND if moment.dtype == torch.uint8 else LARGEST_FIRST
            pack(moment, scales, value.clamp_(-largest, largest), seed)
        elif value is not moment:
            moment.copy_(value)


# ------------------------------------------------------------------------------------------ gradients and masters


def scaled(gradient: Tensor, scaling: Scaling, in_bf16: bool) -> Tensor:
    """Return a gradient in fp32, scaled, and each time rounded. It may be the argument itself, which is only read."""
    g = gradient.float()
    for factor in scaling:
        if isinstance(factor, Tensor) or factor != 1:
            g = g * factor
            if in_bf16:  # round as casts do, which a compiler would leave out: nothing is kept in bf16
                bits = g.view(torch.int32)
                rounded = bits + (((bits >> 16) & 1) + 0x7FFF) & -0x10000
                g = torch.where(g == g, rounded.view(torch.float32), g)
    return g


def load_weight(weight: Tensor, low: Tensor | None, ties: Tensor | None) -> Tensor:
    """Return the master, where it lies or as a copy; the sign of `ties` tells how a tie was rounded, up without it."""
    if low is None:
        return weight.float()
    master = weight.float()
    bits = master.view(torch.int32)
    if ties is None:  # the lower half is negative if the upper one was rounded up
        return bits.add_(low).view(torch.float32)
    at_tie = ties.signbit().logical_not_()
    return bits.add_(low.add(at_tie, alpha=-1)).add_(at_tie).view(torch.float32)


def store_weight(memory: Memory, p: Tensor, has_sign: bool) -> Tensor | None:
    """Write a master. If a sign bit is to tell, return the elements that were in the middle and were rounded up."""
    if memory.low is None:
        if p is not memory.weight:
            memory.weight.copy_(p)
        return None
    # every NaN has the bits that `.bfloat16()` makes of it
    bits = p.masked_fill_(p != p, math.nan).view(torch.int32)
    memory.low.copy_(bits)
    if not has_sign:
        memory.weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        return None
    memory.weight.copy_(bits.view(torch.float32))
    return bits.bitwise_and_(0x1FFFF).eq_(0x18000)


# --------------------------------------------------------------------------------------------------------- the moments


# No bits are promised for codes: the kernels' compiler decides how they divide, and which operations it joins.


def unpack(moment: Tensor, scales: Tensor) -> Tensor:
    """Return the values of flat codes in fp32: those of whole groups, or of one that is not whole."""
    value = moment.float()
    rows = value.view(scales.shape[0], -1)
    if moment.dtype == torch.uint8:
        rows.add_(1).mul_(scales[:, None] / 256).square_()
    else:
        divisor = 254 - rows.abs()
        rows.mul_(scales[:, None]).div_(divisor)
    return value


def pack(moment: Tensor, scales: Tensor, value: Tensor, seed: Tensor) -> None:
    """Write a moment in codes: of whole groups, or of one that is not whole. Its value is overwritten."""
    rows, codes = value.view(scales.shape[0], -1), moment.view(scales.shape[0], -1)
    if moment.dtype == torch.uint8:
        rows.sqrt_()
        torch.amax(rows, 1, out=scales)
        # or some would round to 257
        factor = torch.full_like(scales, 256 * (1 - 2**-20)).div_(scales.masked_fill(scales == 0, 1))
        rows.mul_(factor[:, None])
        # at random up or down, by a number between -1 and 0 that depends on the value and on the step
        noise = (rows.view(torch.int32) * _SPREADS + seed).float() * 2**-32 - 0.5
        codes.copy_(rows.add_(noise).clamp_(min=0))  # values below the first code become the first one
    else:
        divisor = rows.abs()
        torch.amax(divisor, 1, out=scales)
        divisor.add_(scales.masked_fill(scales == 0, 1)[:, None])
        codes.copy_(torch.mul(rows, 254).div_(divisor).round_())
