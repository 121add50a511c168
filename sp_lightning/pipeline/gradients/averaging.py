"""Gradients averaged over processes, between autograd and the host.

It is done on the device, before they leave it, and in the dtype of their masters.

[Note: whose turn it is]
What one process sends, all others have to wait for, and it must belong to the same weights everywhere. But each
follows a backward pass of its own: a layer may be left out in one of them, or a weight may have left its unit. So
before gradients are averaged, the processes tell each other which weights they have gradients of. This is a small
message between hosts, which runs ahead of the devices. They agree on one of these sets; who has no gradient of a
weight in it adds zero, and may come to it later: then it has another turn, and cannot be stepped before backward ends.
Who has ended its backward pass takes part until nobody has any gradient left.

[Note: accumulation]
As under torch's DDP, the sums of micro-batches are averaged, with the last one, and not each micro-batch: other sums
would round otherwise. So while `accumulates` is set, gradients are added up on the host of each process; with the last
micro-batch's they go to the device once more. Those that a user's hook must see, and sparse ones, are averaged in each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline._private import tensor_hooks
from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

Gradients = dict[Weight, Tensor]


class Averaging:
    """Averages the gradients of an arrangement's weights.

    Args:
        replicas: The processes.
        weights: All weights, in an order that is the same in all processes.
        elsewhere: Parameters that autograd itself collects gradients of, on the device.
        moment: What has to be the same in all processes whenever gradients are averaged: a number of steps.
    """

    def __init__(
        self,
        replicas: Replicas,
        weights: Iterable[Weight],
        elsewhere: Sequence[nn.Parameter],
        moment: Callable[[], int],
    ) -> None:
        self._replicas = replicas
        self._weights = list(weights)
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        self._elsewhere = elsewhere
        self._moment = moment
        self._open: set[Weight] = set()
        self._under_way: tuple[Gradients, list[dist.Work]] | None = None
        self._sums: HostGradients
        self._gathered: Mapping[Unit, dict[Weight, Tensor]]

    def work_with(self, gradients: HostGradients, gathered: Mapping[Unit, dict[Weight, Tensor]]) -> None:
        """Take note of what is there besides what `average` is given.

        Args:
            gradients: Those on the host: sums of earlier micro-batches are taken from there.
            gathered: Those on the device that have not left yet: they are taken when another process has their turn.
        """
        self._sums, self._gathered = gradients, gathered

    # ------------------------------------------------------------------------------------------- while backward runs

    def is_due(self, weight: Weight) -> bool:
        """Whether a gradient is averaged in this backward pass, and not with that of a later micro-batch."""
        return not self._replicas.accumulates or bool(tensor_hooks(weight.master))

    def leave_for_later(self, weights: Iterable[Weight]) -> None:
        """Gradients go to the host as they are, and are averaged with those of a later micro-batch."""
        self._replicas.unaveraged.update(id(weight.master) for weight in weights)

    def average(self, gradients: Mapping[Weight, Tensor]) -> Iterator[Gradients]:
        """Have gradients averaged while backward goes on.

        Args:
            gradients: On the device. They are not changed.

        Yields:
            What has been averaged since the last call: as a rule what was given then.
        """
        left = dict(gradients)
        while left:
            yield from self._start(self._agree(left, goes_on=True), left)

    def is_final(self, weights: Iterable[Weight]) -> bool:
        """Whether no process can come to these weights any more in this backward pass, once their turn has come."""
        return self._open.isdisjoint(weights)

    # ------------------------------------------------------------------------------------------------ when it ends

    def finish(self) -> Iterator[Gradients]:
        """Backward is over in this process: take part until it is over in all of them.

        Yields:
            What has been averaged since the last call.
        """
        self._replicas.passes += 1
        while turn := self._agree(self._sums_that_are_due()):
            yield from self._start(turn, {})
        yield from self._complete()
        self._open.clear()

    def average_sparse(self, gradients: Mapping[Weight, list[Tensor]]) -> dict[Weight, list[Tensor]]:
        """Average sparse gradients, when backward is over in all processes.

        Args:
            gradients: For each weight what backward has brought, one after the other.
        """
        left = {weight: reduce(torch.add, parts).to("cpu") for weight, parts in gradients.items()}
        averaged = {}
        while turn := self._agree(left):
            for weight in turn:
                own = left.pop(weight, None)
                part = (_no_rows(weight) if own is None else own).coalesce() * (1 / self._replicas.count)
                dist.all_reduce(part, group=self._replicas.host_group)
                averaged[weight] = [part]
        return averaged

    def has_elsewhere(self) -> bool:
        """Whether there are gradients of parameters that are elsewhere."""
        return any(parameter.grad is not None for parameter in self._elsewhere)

    def average_elsewhere(self) -> None:
        """Average the gradients of parameters that are elsewhere, when backward is over in all processes.

        What was averaged before is in them, and is not changed by it: it is the same in all processes. So are sums of
        micro-batches, which wait for the last one.
        """
        if self._replicas.accumulates:
            return
        used = torch.tensor([parameter.grad is not None for parameter in self._elsewhere], dtype=torch.int32)
        if used.numel():
            dist.all_reduce(used, group=self._replicas.host_group)
        for parameter, users in zip(self._elsewhere, used.tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average = (own * (1 / self._replicas.count)).contiguous()
                dist.all_reduce(average)
                parameter.grad = own.copy_(average)

    def abandon(self) -> None:
        """After an exception: nothing is on its way any more."""
        self._under_way = None
        self._open.clear()

    def _agree(self, mine: Collection[Weight], goes_on: bool = False) -> list[Weight]:
        """Whose gradients are averaged next (see the note above); nobody's when no process has any left.

        Args:
            mine: What this process has.
            goes_on: Whether its backward pass goes on and may bring more.

        Raises:
            RuntimeError: The processes are not at the same moment of the training.
        """
        has = torch.zeros(len(self._weights), dtype=torch.int32, device="cpu")
        has[[self._numbers[weight] for weight in mine]] = 1
        message = torch.cat([torch.tensor([self._moment(), goes_on], dtype=torch.int32, device="cpu"), has])
        answers = [torch.empty_like(message) for _ in range(self._replicas.count)]
        dist.all_gather(answers, message, group=self._replicas.host_group)
        moments = [int(answer[0]) for answer in answers]
        if len(set(moments)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({moments}) when they average "
                "gradients. Every process has to run backward as often as the others between two steps; a "
                "`training_step` that returns None in one of them does not."
            )
        sets = [answer[2:].nonzero().flatten().tolist() for answer in answers]
        # backward came to its first layer last; where that is a later one, others are as far or further
        turn = max(sets, key=lambda numbers: numbers[0] if numbers else -1)
        missing = (set(turn) - set(numbers) for numbers, answer in zip(sets, answers, strict=True) if answer[1])
        self._open.update(self._weights[number] for number in set[int]().union(*missing))
        return [self._weights[number] for number in turn]

    def _start(self, turn: Sequence[Weight], left: dict[Weight, Tensor]) -> Iterator[Gradients]:
        averaged = {}
        for weight in turn:
            parts = [*self._take_sum(weight), *self._take_gathered(weight)]
            if weight in left:
                parts.append(left.pop(weight))
            self._replicas.unaveraged.discard(id(weight.master))
            own = reduce(torch.add, [part.to(weight.master.dtype) for part in parts] or [_nothing(weight)])
            averaged[weight] = (own * (1 / self._replicas.count)).contiguous()
        works = [dist.all_reduce(gradient, async_op=True) for gradient in averaged.values()]
        yield from self._complete()
        self._under_way = averaged, works

    def _complete(self) -> Iterator[Gradients]:
        if self._under_way is not None:
            (averaged, works), self._under_way = self._under_way, None
            for work in works:
                work.wait()
            yield averaged

    # ------------------------------------------------------------------------------------------ sums of micro-batches

    def check_averaged(self, weights: Iterable[Weight]) -> None:
        """Called before weights are stepped.

        Raises:
            RuntimeError: A gradient is the sum of this process alone.
        """
        for weight in weights:
            if self._unaveraged(weight) is not None:
                raise RuntimeError(
                    f"The gradient of {weight.name!r} would be stepped before it was averaged over processes, because "
                    "the last micro-batch of the step had no backward. `training_step` may not return None there."
                )

    def _unaveraged(self, weight: Weight) -> Tensor | None:
        return self._sums.get(weight) if id(weight.master) in self._replicas.unaveraged else None

    def _sums_that_are_due(self) -> list[Weight]:
        """Those that the last micro-batch has added nothing to."""
        if self._replicas.accumulates:
            return []
        return [weight for weight in self._weights if self._unaveraged(weight) is not None]

    def _take_sum(self, weight: Weight) -> list[Tensor]:
        """What earlier micro-batches have left on the host, back on the device."""
        if self._unaveraged(weight) is None:
            return []
        self._sums.expect_more([weight])
        self._sums.let_land([weight])
        total = self._sums.get(weight)
        assert total is not None
        self._sums.drop(weight)
        weight.master.grad = None
        # without waiting: it is overwritten by the average at the earliest, which is made of it
        return [total.to(weight.twin.data.device, weight.master.dtype, copy=True, non_blocking=True)]

    def _take_gathered(self, weight: Weight) -> list[Tensor]:
        gathered = self._gathered.get(weight.unit, {})
        return [gathered.pop(weight)] if weight in gathered and self.is_due(weight) else []


def _nothing(weight: Weight) -> Tensor:
    """The part of a process that has not used a weight."""
    return torch.zeros(weight.host.shape, dtype=weight.master.dtype, device=weight.twin.data.device)


def _no_rows(weight: Weight) -> Tensor:
    """The same of a sparse gradient."""
    rows, *columns = weight.host.shape
    values = torch.empty(0, *columns, dtype=weight.master.dtype)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), values, (rows, *columns))
