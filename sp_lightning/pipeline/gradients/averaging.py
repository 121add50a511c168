"""Averaging of gradients over processes, between autograd and the host.

It takes place on the device, before gradients leave it, and in the dtype of their masters. They are put together in the
staging buffer in which they leave, and there scaled and all-reduced, with one operation each for a stretch of one
dtype. The processes first have to agree whose turn it is (agreement.py). While backward runs, one turn is under way.

Sparse gradients are averaged in each micro-batch; all others once, with the last micro-batch, as sums (unaveraged.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.agreement import Agreement
from sp_lightning.pipeline.gradients.buffers import StagingBuffer, StagingBuffers, unit_of
from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.gradients.unaveraged import Unaveraged
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Averaged(NamedTuple):
    """Gradients that have had their turn.

    Attributes:
        layout: Their weights: those of one unit, in its order, or any others; and how they lie in the staging buffer.
        staging: The memory that they lie in.
    """

    layout: GradientLayout
    staging: StagingBuffer


class ReplicatedWeights(NamedTuple):
    """The weights of an arrangement of which other processes have replicas.

    Attributes:
        replicas: The processes.
        weights: All weights, in the same order in all processes.
        unmanaged: Parameters that the engine does not manage: autograd accumulates their gradients on the device.
        steps_taken: Returns the number of optimizer steps taken, those of one process alone not counted: it must be the
            same in all processes whenever gradients are averaged.
    """

    replicas: Replicas
    weights: Sequence[Weight]
    unmanaged: Sequence[nn.Parameter]
    steps_taken: Callable[[], int]


class Averaging:
    """Averages the gradients of an arrangement's weights.

    Args:
        replicated: The weights, and the processes that train replicas of them.
        unaveraged: Sums of earlier micro-batches, on the host.
        gathered: Gradients that have not left the device yet: taken when another process gives them a turn.
        staging_buffers: Memory in which gradients are put together, and leave.

    Attributes:
        replicas: The processes.
        unaveraged: Sums of earlier micro-batches, on the host.
    """

    def __init__(
        self,
        replicated: ReplicatedWeights,
        unaveraged: Unaveraged,
        gathered: Mapping[Unit, dict[Weight, Tensor]],
        staging_buffers: StagingBuffers,
    ) -> None:
        self.replicas = replicated.replicas
        self.unaveraged = unaveraged
        self._weights = replicated.weights
        self._unmanaged = replicated.unmanaged
        self._gathered = gathered
        self._staging_buffers = staging_buffers
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        count = len(self._weights) + len(self._unmanaged)
        self._agreement = Agreement(count, replicated.steps_taken, self._exchange)
        self._deferred: list[int] = []
        self._under_way: tuple[Averaged, list[dist.Work]] | None = None

    # ------------------------------------------------------------------------------------------- while backward runs

    @property
    def is_due(self) -> bool:
        """Whether gradients are averaged in this backward pass, and not in that of a later micro-batch, or never."""
        return self.replicas.averages and not self.replicas.accumulates

    def average(self, gradients: Mapping[Weight, Tensor]) -> Iterator[Averaged]:
        """Start averaging gradients while backward runs.

        Args:
            gradients: Gradients on the device; they are not changed.

        Yields:
            Turns that have ended since the last call: as a rule that of the gradients given then.
        """
        left = dict(gradients)
        while left:
            yield from self.complete()
            self._start(self._agree(left, goes_on=True), left)

    def complete(self) -> Iterator[Averaged]:
        """Make computing wait for the turn that is under way, if there is one, and yield it."""
        if self._under_way is not None:
            averaged, works = self._under_way
            for work in works:
                work.wait()
            self._under_way = None
            yield averaged

    def is_final(self, weights: Iterable[Weight]) -> bool:
        """Tell whether no process can bring more gradients of weights that have had their turn in this pass."""
        return self._agreement.is_final(self._numbers[weight] for weight in weights)

    # ------------------------------------------------------------------------------------------------ when it ends

    def finish(self, sparse: Collection[Weight]) -> Iterator[Averaged]:
        """Keep taking turns after this process's own backward, until backward is over in all processes.

        Args:
            sparse: Weights that this process has sparse gradients of.

        Yields:
            Turns that have ended since the last call.
        """
        self.replicas.passes += 1
        deferred = [self._numbers[weight] for weight in sparse]
        if not self.replicas.accumulates:
            first = len(self._weights)
            deferred += [first + index for index, other in enumerate(self._unmanaged) if other.grad is not None]
        while turn := self._agree(self._sums_that_are_due(), deferred, goes_on=False):
            yield from self.complete()
            self._start(turn, {})
        yield from self.complete()
        self._agreement.end()

    def _sums_that_are_due(self) -> list[Weight]:
        """Return the weights whose sums are due although the last micro-batch has added nothing to them."""
        return [] if self.replicas.accumulates else self.unaveraged.among(self._weights)

    def average_sparse(self, gradients: Mapping[Weight, list[Tensor]]) -> dict[Weight, list[Tensor]]:
        """Average sparse gradients, when backward is over in all processes.

        Args:
            gradients: The gradients that backward has brought for each weight, in the order of their arrival.
        """
        averaged = {}
        for weight in [self._weights[number] for number in self._deferred if number < len(self._weights)]:
            own = reduce(torch.add, gradients[weight]).to("cpu") if weight in gradients else _without_rows(weight)
            part = own.coalesce() * (1 / self.replicas.count)
            dist.all_reduce(part, group=self.replicas.host_group)
            averaged[weight] = [part]
        return averaged

    def has_unmanaged(self) -> bool:
        """Tell whether an unmanaged parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._unmanaged)

    def average_unmanaged(self) -> None:
        """Average the gradients of unmanaged parameters, when backward is over in all processes.

        They may contain gradients that were averaged earlier. Averaging does not change those, as they are the same in
        all processes. Sums of micro-batches wait for the last one.
        """
        first = len(self._weights)
        for parameter in [self._unmanaged[number - first] for number in self._deferred if number >= first]:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            average = (own * (1 / self.replicas.count)).contiguous()
            dist.all_reduce(average)
            parameter.grad = own.copy_(average)

    def abandon(self) -> None:
        """Forget the turn that is under way, after an exception."""
        if self._under_way is not None:
            self._staging_buffers.discard(self._under_way[0].staging)  # the all-reduce may still write to it
            self._under_way = None
        self._agreement.end()
        self.unaveraged.forget()

    # --------------------------------------------------------------------------------------------------------- a turn

    def _agree(self, mine: Iterable[Weight], deferred: Iterable[int] = (), *, goes_on: bool) -> list[Weight]:
        """Return the weights whose gradients are averaged next; none when no process has any left."""
        turn = self._agreement.next_turn([self._numbers[weight] for weight in mine], deferred, goes_on=goes_on)
        self._deferred = turn.deferred
        return [self._weights[number] for number in turn.weights]

    def _exchange(self, message: Tensor) -> list[Tensor]:
        answers = [torch.empty_like(message) for _ in range(self.replicas.count)]
        dist.all_gather(answers, message, group=self.replicas.host_group)
        return answers

    def _start(self, turn: list[Weight], left: dict[Weight, Tensor]) -> None:
        """Put a turn's gradients together, and start averaging them.

        Args:
            turn: The weights whose turn it is.
            left: Gradients that this process has yet to contribute; those used here are removed.
        """
        sums = self.unaveraged.take(turn)
        parts = [
            [found.pop(weight) for found in (sums, self._gathered.get(weight.unit, {}), left) if weight in found]
            for weight in turn
        ]
        layout = GradientLayout.in_master_dtypes(turn)
        buffers = self._staging_buffers
        staging = buffers.take(layout.nbytes) if unit_of(turn) is not None else buffers.make(layout.nbytes)
        _write_sums(staging.tensors(layout), parts)
        works = []
        for flat in layout.flat_in(staging.memory):
            flat.mul_(1 / self.replicas.count)
            works.append(dist.all_reduce(flat, async_op=True))
        self._under_way = Averaged(layout, staging), works


def _write_sums(targets: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Write the sum of each weight's gradients to its target; zeros if this process has no gradient of it."""
    used = [target for target, own in zip(targets, parts, strict=True) if own]
    if used:
        torch._foreach_copy_(used, [own[0] for own in parts if own])
    for target, own in zip(targets, parts, strict=True):
        if not own:
            target.zero_()
        for further in own[1:]:
            target.add_(further.to(target.dtype))


def _without_rows(weight: Weight) -> Tensor:
    """Return a sparse gradient without rows: the contribution of a process that has not used the weight."""
    rows, *columns = weight.host.shape
    values = torch.empty(0, *columns, dtype=weight.master.dtype)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), values, (rows, *columns))
