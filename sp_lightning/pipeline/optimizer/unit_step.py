"""The optimizer's step over weights that travel together, with as few passes over host memory as can be.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)

For torch's fused AdamW, Adam and SGD this is one pass of a compiled kernel (`sp_lightning.optim`). Otherwise the code
of the user's optimizer makes a pass for each operation. All bits are as after `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim import rules
from sp_lightning.optim.of_torch import OnePass, Work, scaling_of
from sp_lightning.pipeline.gradients.unit_gradients import NO_SCALING, Scaling
from sp_lightning.pipeline.optimizer.kinds import State
from sp_lightning.pipeline.torch_private import StepCode

# Elements of a weight whose gradient is cast and scaled by itself: smaller ones together, or Python's time would show.
_ALONE = 1 << 16


class Update(NamedTuple):
    """The update of one parameter in the eyes of the optimizer's code: of a weight, or of a part of one."""

    parameter: Tensor  # memory of the master
    gradient: Tensor  # as it arrived; it is only read
    scaling: Scaling  # unscaling and clipping of the gradient before the update
    state: State  # the optimizer's, which the code changes; empty before it is made, and if there is none
    copy: Tensor | None  # the lowered copy to write

    @property
    def is_first(self) -> bool:
        """Whether it makes the state."""
        return all(value is None for value in self.state.values())


def update_weights(optimizer: Optimizer, settings: dict[str, Any], updates: Sequence[Update]) -> None:
    """Update masters and state as `optimizer.step()` would, and copies.

    The caller turns gradients, inference mode and overrides of torch functions off.

    Args:
        optimizer: The user's optimizer.
        settings: The param group without its parameters, as it was when the user's `step` was called.
        updates: Those of weights that have a gradient.
    """
    code = StepCode(optimizer, settings.copy())
    together: list[Update] = []
    one_pass, works = OnePass(optimizer, settings), []
    numbers: dict[Any, rules.Scaling | None] = {}
    for update in updates:
        update = update._replace(scaling=update.scaling.without_ones)
        if one_pass.takes(work := _work(update, numbers)):
            works.append(work)
        elif update.parameter.numel() < _ALONE:
            together.append(update)
        else:
            _update(code, [update])
    # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
    for is_first in (False, True):
        _update(code, [update for update in together if update.is_first is is_first])
    if works:
        one_pass.step(works)


def _work(update: Update, numbers: dict[Any, rules.Scaling | None]) -> Work:
    """Return an update for one pass; scalings as `numbers` are shared, because each look at a factor takes time."""
    parameter, gradient, scaling, state, copy = update
    known = scaling, parameter.dtype
    if known not in numbers:
        numbers[known] = scaling_of(scaling.factors, scaling.clamp, parameter.dtype)
    return Work(parameter, gradient, state, copy, numbers[known])


def _update(code: StepCode, updates: Sequence[Update]) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies."""
    for parameter, arrived, scaling, *_ in updates:
        gradient = arrived
        if scaling != NO_SCALING or arrived.dtype != parameter.dtype:
            gradient = torch.empty_like(arrived, dtype=parameter.dtype).copy_(arrived)
            scaling.apply_(gradient)
        parameter.grad = gradient
    if updates:
        code.run({update.parameter: update.state for update in updates})
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter)
