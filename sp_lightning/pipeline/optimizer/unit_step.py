"""The optimizer's step over weights that travel together, with as few passes over host memory as can be.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)

For torch's fused AdamW, Adam and SGD this is one pass of a compiled kernel (`sp_lightning.optim`). Otherwise the code
of the user's optimizer makes a pass for each operation; it runs on memory of our choice, so large weights are cut into
parts that stay in the cache from one operation to the next. All bits are as after `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim import rules
from sp_lightning.optim.of_torch import OnePass, Work, scaling_of
from sp_lightning.pipeline.gradients.unit_gradients import Scaling
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, State
from sp_lightning.pipeline.torch_private import StepCode
from sp_lightning.pipeline.weights.buffers import is_dense

# Elements for each thread: so many of a gradient, a master and a copy stay in its cache. Torch's CPU loops compute the
# elements left over after the last whole vector one by one, which may round differently. So the position of an element
# in its tensor decides its bits: weights are cut at multiples of any vector's length only.
_PART = 1 << 18


class Update(NamedTuple):
    """The update of one parameter in the eyes of the optimizer's code: of a weight, or of a part of one."""

    parameter: Tensor  # memory of the master
    gradient: Tensor  # as it arrived; it is only read
    scaling: Scaling  # unscaling and clipping of the gradient before the update
    state: State  # the optimizer's, which the code changes; empty before it is made, and if there is none
    copy: Tensor | None  # the lowered copy to write

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to do besides the update."""
        return self.copy is None and not self.scaling and self.gradient.dtype == self.parameter.dtype

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
    # parts for two threads at least: in smaller ones the time that Python takes between them would show
    limit = _PART * max(2, torch.get_num_threads())
    cuts = type(optimizer) in BY_ELEMENT
    together: list[Update] = []  # by torch's fused kernel, which makes one pass, or so small that Python would show
    one_pass, works = OnePass(optimizer, settings), []
    numbers: dict[Any, rules.Scaling | None] = {}
    for update in updates:
        update = update._replace(scaling=update.scaling.without_ones)
        size = update.parameter.numel()
        if update.is_plain and (settings.get("fused") or not cuts):
            together.append(update)
        elif one_pass.takes(work := _work(update, numbers)):
            works.append(work)
        elif size <= _PART // 4:
            together.append(update)
        elif cuts and size > limit and _can_be_cut(update):
            _update_by_parts(code, update, limit)
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


def _can_be_cut(update: Update) -> bool:
    """Tell whether all of a weight's memory lies alike; state, by the first step that makes it, is made as a whole."""
    parameter, states = update.parameter, update.state.values()
    alike = [update.gradient, *(value for value in states if isinstance(value, Tensor) and value.dim())]
    return (
        bool(update.state)
        and is_dense(parameter)
        and all(isinstance(value, Tensor) and value.device.type == "cpu" for value in states)
        and all(tensor.shape == parameter.shape and tensor.stride() == parameter.stride() for tensor in alike)
    )


def _update_by_parts(code: StepCode, update: Update, limit: int) -> None:
    for part in _parts(update, limit):
        _update(code, [part])
    for key, value in part.state.items():
        if value.dim() == 0:
            update.state[key].copy_(value)


def _parts(update: Update, limit: int) -> Iterator[Update]:
    count = update.parameter.numel()

    def flat(tensor: Tensor) -> Tensor:
        return tensor.as_strided((count,), (1,))

    parameter, gradient, copy = flat(update.parameter), flat(update.gradient), update.copy
    state = {key: flat(value) if value.dim() else value for key, value in update.state.items()}
    for start in range(0, count, limit):
        part = slice(start, min(start + limit, count))
        # the code changes a number such as `step` once for each parameter: each part has its own
        own = {key: value[part] if value.dim() else value.clone() for key, value in state.items()}
        yield Update(parameter[part], gradient[part], update.scaling, own, None if copy is None else flat(copy)[part])


def _update(code: StepCode, updates: Sequence[Update]) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies."""
    for parameter, arrived, scaling, *_ in updates:
        gradient = arrived
        if scaling or arrived.dtype != parameter.dtype:
            gradient = torch.empty_like(arrived, dtype=parameter.dtype).copy_(arrived)
            scaling.apply_(gradient)
        parameter.grad = gradient
    if updates:
        code.run({update.parameter: update.state for update in updates})
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter)
