"""A pass by torch's operations, for weights on an accelerator, in the formats of the kernels (see formats.py).

The update itself is torch's own code, so it rounds as plain training does there. Nothing waits for the device.
"""

from __future__ import annotations

import torch

from sp_lightning.optim.formats import (
    flat,
    groups_in,
    load_weight,
    pack,
    scaled,
    store_weight,
    unpack,
    whole_and_rest,
)
from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import Memory, Pass

PIECE = 1 << 23
"""Elements that are stepped at once, a multiple of `BLOCK`."""

BYTES_MEANWHILE = 28
"""What each of them takes of the device's memory at most, while it is stepped."""


@torch.no_grad()
def step_on_device(step: Pass) -> None:
    """Run a pass, in pieces."""
    memory = Memory(*[None if tensor is None else flat(tensor) for tensor in step.memory])
    for begin, end in whole_and_rest(memory.weight.numel(), GROUP):
        for start in range(begin, end, PIECE):
            part = _part_of(memory, start, min(start + PIECE, end))
            _step(step._replace(memory=part, begin=step.begin + start))


def _part_of(memory: Memory, begin: int, end: int) -> Memory:
    """Return the part of flat memory that is a range's; of codes, it begins where a group does."""
    groups = groups_in(begin, end)
    tensors = [None if tensor is None else tensor[begin:end] for tensor in memory[:6]]
    scales = [None if tensor is None else tensor[groups] for tensor in memory[6:]]
    return Memory(*tensors, *scales)


def _step(step: Pass) -> None:
    memory = step.memory
    kept = [
        (moment, scales)
        for moment, scales in ((memory.first, memory.first_scale), (memory.second, memory.second_scale))
        if moment is not None
    ]
    gradient = scaled(memory.gradient, step.scaling, memory.weight.dtype == memory.gradient.dtype == torch.bfloat16)
    moments = [moment.float() if scales is None else unpack(moment, scales) for moment, scales in kept]
    # to keep a tie in, see [Note: ties] in codecs.py
    ties = moments[1] if memory.low is not None and memory.second_scale is None else None
    weight = load_weight(memory.weight, memory.low, ties)
    if ties is not None:
        ties.abs_()
    step.update.step(step.group, step.step, weight, gradient, moments)
    del gradient
    if memory.copy is not None:
        memory.copy.copy_(weight)
    was_up = store_weight(memory, weight, ties is not None)
    if ties is not None:
        ties.view(torch.int32).add_(was_up, alpha=-(1 << 31))
    for (moment, scales), value in zip(kept, moments, strict=True):
        if scales is not None:
            pack(moment, scales, value, step.seed, step.begin)
        elif value is not moment:
            moment.copy_(value)
