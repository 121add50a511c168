"""Averaging of gradients over processes, between autograd and the host.

It takes place on the device, in the staging buffer in which gradients leave, and in the dtype of their masters. Each
micro-batch is averaged.

[Note: the order of units]
A collective operation makes every process wait for the others, and must be for the same weights in all of them. So all
of them average units in one order: that in which the first process's backward completed them last time. A unit that is
complete earlier waits for its turn. A message before the first one makes sure that all processes are about to average
the same. When a process's own backward has ended, it averages what is left, with zeros for
what it has not reached. Then all tell each other which weights they have reached: others keep no gradient.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.buffers import StagingBuffer
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, UnitGradients

_NONE, _DENSE, _SPARSE = range(3)  # kinds of gradients


class CountsSteps(Protocol):
    """What counts the optimizer steps of a process."""

    steps_taken: int


class Averaging:
    """Averages the gradients of an arrangement's weights.

    Attributes:
        replicas: The processes.
    """

    def __init__(self, replicas: Replicas, unmanaged: Sequence[nn.Parameter], steps: CountsSteps) -> None:
        self.replicas = replicas
        self._unmanaged = unmanaged
        self._steps = steps
        self._units: list[UnitGradients] = []
        self._order: list[UnitGradients] = []
        self._complete: dict[UnitGradients, None] = {}
        self._started: set[UnitGradients] = set()
        self._deferred: list[tuple[nn.Parameter, int]] = []
        self._has_begun = False
        self._signature = 0
        self._turn = 0
        self._under_way: tuple[UnitGradients, StagingBuffer, list[dist.Work]] | None = None

    def of(self, units: Sequence[UnitGradients]) -> None:
        """Average the gradients of these units; processes may expect them in other orders."""
        self._units = sorted(units, key=lambda unit: (unit.unit.resident, _in_words_and_numbers(unit.unit.name)))
        by_name = {unit.unit.name: unit for unit in self._units}
        if self.replicas.order.keys() != by_name.keys():  # else what was agreed on in another arrangement
            names = list(by_name)[::-1]
            names.sort(key=lambda name: by_name[name].unit.resident)
            self.replicas.order = dict.fromkeys(names)
        self._order = [by_name[name] for name in self.replicas.order]
        weights = [(weight.name, str(weight.dtype)) for unit in self._units for weight in unit.unit.weights]
        self._signature = zlib.crc32(repr([weights, [len(unit.unit.weights) for unit in self._units]]).encode())

    # ------------------------------------------------------------------------------------------- while backward runs

    def begin(self) -> None:
        """Make sure, before a backward pass averages its first unit, that all processes are at the same point.

        Raises:
            RuntimeError: They have taken different numbers of optimizer steps, or have different units.
        """
        if self._has_begun:
            return
        self._has_begun = True
        answers = self._exchange([self._steps.steps_taken, self._signature])
        steps, signatures = [int(answer[0]) for answer in answers], {int(answer[1]) for answer in answers}
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({steps}) when they average gradients. "
                "Every process has to run backward equally often between two steps: `training_step` may not return "
                "None in some of them only."
            )
        if len(signatures) > 1:
            raise RuntimeError(
                "The processes have different units, as some of them use a weight outside of its module that others do "
                "not. Name it in `resident=`."
            )

    def _exchange(self, numbers: Sequence[int]) -> list[Tensor]:
        message = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        answers = [torch.empty_like(message) for _ in range(self.replicas.count)]
        dist.all_gather(answers, message, group=self.replicas.host_group)
        return answers

    def next_after(self, unit: UnitGradients) -> Iterator[UnitGradients]:
        """Note that a unit is complete, and yield those whose turn it is, which are complete as well."""
        self._complete[unit] = None
        while self._turn < len(self._order):
            following = self._order[self._turn]
            if following not in self._complete and not following.is_frozen:
                break
            self._turn += 1
            if not following.is_frozen:
                yield following

    def check_not_started(self, unit: UnitGradients) -> None:
        """Raise if a gradient comes too late.

        Raises:
            RuntimeError: The unit was complete, and is averaged already.
        """
        if unit in self._started:
            raise RuntimeError(
                f"A weight of {unit.unit.name!r} got another gradient in a backward pass in which all of the "
                "unit's had come, and were averaged. Use checkpoints with `use_reentrant=False`."
            )

    def start(self, unit: UnitGradients, staging: StagingBuffer) -> None:
        """Start averaging what lies in a staging buffer."""
        self._started.add(unit)
        works = []
        for flat in unit.layout.flat_in(staging.bytes):
            flat.mul_(1 / self.replicas.count)
            works.append(dist.all_reduce(flat, async_op=True))
        self._under_way = unit, staging, works

    def wait(self) -> tuple[UnitGradients, StagingBuffer, bool] | None:
        """Make computing wait for what is being averaged.

        Returns:
            Whose gradients they are, where they lie, and whether the unit was complete in this process.
        """
        if self._under_way is None:
            return None
        unit, staging, works = self._under_way
        self._under_way = None
        for work in works:
            work.wait()
        return unit, staging, unit in self._complete

    # ------------------------------------------------------------------------------------------------ when it ends

    def left(self) -> Iterator[UnitGradients]:
        """Yield the units whose turn has not come: the order is the same in all processes."""
        while self._turn < len(self._order):
            self._turn += 1
            if not self._order[self._turn - 1].is_frozen:
                yield self._order[self._turn - 1]

    def agree(self, arrived: Collection[Gradient]) -> set[Gradient]:
        """Tell the other processes which weights this one has reached, and return those that any has."""
        self.replicas.passes += 1
        gradients = [gradient for unit in self._units for gradient in unit.gradients]
        numbers = {unit: number for number, unit in enumerate(self._units)}
        order = [numbers[unit] for unit in self._complete]
        order += [number for number in reversed(range(len(self._units))) if self._units[number] not in self._complete]
        flags = [*(gradient in arrived for gradient in gradients), *map(_kind_of_gradient, self._unmanaged)]
        answers = self._exchange([*order, *flags])
        first = len(order)
        reached = torch.stack(answers)[:, first:].amax(0).tolist()
        self._order = [self._units[number] for number in answers[0][:first].tolist()]
        self.replicas.order = dict.fromkeys(unit.unit.name for unit in self._order)
        self._deferred = list(zip(self._unmanaged, reached[len(gradients) :], strict=True))
        self._reset()
        return {gradient for gradient, flag in zip(gradients, reached, strict=False) if flag}

    def has_unmanaged(self) -> bool:
        """Tell whether an unmanaged parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._unmanaged)

    def average_unmanaged(self) -> None:
        """Average the gradients of unmanaged parameters that any process has one of.

        They may contain gradients of earlier micro-batches. Averaging does not change those, as they are the same in
        all processes.
        """
        for parameter, kind in self._deferred:
            own = parameter.grad
            if kind == _DENSE:
                own = torch.zeros_like(parameter) if own is None else own
                average = (own * (1 / self.replicas.count)).contiguous()
                dist.all_reduce(average)
                parameter.grad = own.copy_(average)
            elif kind == _SPARSE:
                rows = _without_rows(parameter) if own is None else own.to("cpu")
                rows = rows.coalesce() * (1 / self.replicas.count)
                dist.all_reduce(rows, group=self.replicas.host_group)
                parameter.grad = rows.to(parameter.device)

    def abandon(self) -> None:
        """Forget what is under way, after an exception."""
        self._under_way = None
        self._reset()

    def _reset(self) -> None:
        self._turn = 0
        self._complete.clear()
        self._started.clear()
        self._has_begun = False


def _in_words_and_numbers(name: str) -> list[str | int]:
    """Return a key that sorts `blocks.2` before `blocks.10`: as a rule the order of the forward."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _kind_of_gradient(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _DENSE if parameter.grad.layout is torch.strided else _SPARSE


def _without_rows(parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient without rows: the contribution of a process that has not used the weight."""
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), values, parameter.shape)
