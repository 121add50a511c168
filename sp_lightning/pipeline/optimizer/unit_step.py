"""The optimizer's step over weights that travel together, with as few passes over host memory as can be.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)

For torch's fused AdamW, Adam and SGD this is one pass of a compiled kernel (`sp_lightning.optim`). Otherwise the code
of the user's optimizer makes a pass for each operation. All bits are as after `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from sp_lightning.optim import rules
from sp_lightning.optim.host import Work
from sp_lightning.optim.of_torch import OnePass, scaling_of
from sp_lightning.pipeline.gradients.scaling import NO_SCALING, Scaling
from sp_lightning.pipeline.torch_private import code_of_step

# Elements of a weight whose gradient is cast and scaled by itself: smaller ones together, or Python's time would show.
_ALONE = 1 << 16

Update: TypeAlias = tuple[Work, Scaling]
"""What is to be done for a weight, and the unscaling and clipping of its gradient before the update."""


def update_weights(optimizer: Optimizer, settings: dict[str, Any], updates: Sequence[Update]) -> None:
    """Update masters and state as `optimizer.step()` would with these settings of a param group, and copies.

    The caller turns gradients, inference mode and overrides of torch functions off.
    """
    code = code_of_step(optimizer, settings.copy())
    together: list[Update] = []
    one_pass = OnePass(optimizer, settings)
    works: list[Work] = []
    # those of a scaling are shared: each look at a factor takes time
    numbers: dict[Any, rules.Scaling | None] = {}
    for work, scaling in updates:
        known = scaling, work.weight.dtype
        if known not in numbers:
            numbers[known] = scaling_of(scaling.without_ones.factors, scaling.clamp, work.weight.dtype)
        work = work._replace(scaling=numbers[known])
        if one_pass.takes(work):
            works.append(work)
        elif work.weight.numel() < _ALONE:
            together.append((work, scaling))
        else:
            _update(code, [(work, scaling)])
    # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
    first_steps = [update for update in together if not _has_state(update)]
    later_steps = [update for update in together if _has_state(update)]
    _update(code, later_steps)
    _update(code, first_steps)
    if works:
        one_pass.step(works)


def _has_state(update: Update) -> bool:
    work, _ = update
    return any(value is not None for value in work.state.values())


def _update(code: Callable[..., None], updates: Sequence[Update]) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies."""
    for work, scaling in updates:
        weight, gradient, scaling = work.weight, work.gradient, scaling.without_ones
        if scaling != NO_SCALING or gradient.dtype != weight.dtype:
            gradient = torch.empty_like(gradient, dtype=weight.dtype).copy_(gradient)
            scaling.apply_(gradient)
        weight.grad = gradient
    if updates:
        code({work.weight: work.state for work, _ in updates})
    for work, _ in updates:
        if work.copy is not None:
            work.copy.copy_(work.weight)
