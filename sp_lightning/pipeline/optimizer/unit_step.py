"""The optimizer's step over weights that travel together, in one pass over host memory.

An optimizer makes one pass over memory for each operation. Here the code of the user's optimizer runs on memory of our
choice: if there is a cast, a clip or a copy to do besides the update, or torch has no fused kernel, weights are cut
into parts that stay in the cache from one operation to the next. All bits are as after `optimizer.step()`.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)
                       `-------------- for one part after the other, in the cache --------------'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

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


def update_weights(optimizer: Optimizer, settings: dict[str, Any], updates: Sequence[Update]) -> None:
    """Update masters and state as `optimizer.step()` would, and copies.

    The caller turns gradients, inference mode and overrides of torch functions off.

    Args:
        optimizer: The user's optimizer.
        settings: The param group without its parameters, as it was when the user's `step` was called.
        updates: Those of weights that have a gradient.
    """
    updates = [each._replace(scaling=each.scaling.without_ones()) if each.scaling else each for each in updates]
    # parts for two threads at least: in smaller ones the time that Python takes between them would show
    limit = _PART * max(2, torch.get_num_threads())
    if settings.get("fused") and all(update.is_plain for update in updates):
        limit = sys.maxsize  # torch's kernel makes one pass
    batch = _Batch(StepCode(optimizer, settings.copy()), limit)
    for update in updates:
        if type(optimizer) in BY_ELEMENT and update.parameter.numel() > limit and _can_be_cut(update):
            part = update
            for part in _parts(update, limit):
                batch.add(part)
            batch.run()
            for key, value in part.state.items():
                if value.dim() == 0:
                    update.state[key].copy_(value)
        else:
            batch.add(update)
    batch.run()


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


class _Batch:
    """Updates that the optimizer's code makes at once: as many as stay in the cache from one operation to the next."""

    def __init__(self, code: StepCode, limit: int) -> None:
        self._code = code
        self._limit = limit
        self._updates: list[Update] = []
        self._size = 0  # elements
        self._are_first = True
        self._scratch: dict[torch.dtype, Tensor] = {}  # for one batch after the other: it stays cached

    def add(self, update: Update) -> None:
        """Add an update, after making those before it if there is no room, or it is of another kind."""
        size = update.parameter.numel()
        # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
        is_first = all(value is None for value in update.state.values())
        if self._size + size > self._limit or is_first != self._are_first:
            self.run()
            self._are_first = is_first
        self._updates.append(update)
        self._size += size

    def run(self) -> None:
        """Cast and scale gradients, run the optimizer's code, and write copies."""
        if not self._updates:
            return
        begin = 0
        for parameter, arrived, scaling, *_ in self._updates:
            gradient = arrived
            if scaling or arrived.dtype != parameter.dtype:
                gradient = self._room_for(arrived, parameter.dtype, begin).copy_(arrived)
                begin += arrived.numel()
                scaling.apply_(gradient)
            parameter.grad = gradient
        self._code.run({update.parameter: update.state for update in self._updates})
        for update in self._updates:
            if update.copy is not None:
                update.copy.copy_(update.parameter)
        self._updates, self._size = [], 0

    def _room_for(self, gradient: Tensor, dtype: torch.dtype, begin: int) -> Tensor:
        if begin + gradient.numel() > self._limit:
            return torch.empty_like(gradient, dtype=dtype)
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self._limit, dtype=dtype)
        return self._scratch[dtype].as_strided(gradient.size(), gradient.stride(), begin)
