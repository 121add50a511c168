"""Gradients averaged over processes, between autograd and the host.

It is done on the device, before they leave it, and in the dtype of their masters. They are put together in the piece of
memory in which they leave; there they are scaled and summed up with one operation each. Whose turn it is, processes
have to agree on (agreement.py). While backward goes on, one turn is under way.

Those that a user's hook must see, and sparse ones, are averaged in each micro-batch; others with the last one, as sums
(unaveraged.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline._private import tensor_hooks
from sp_lightning.pipeline.gradients.agreement import Agreement
from sp_lightning.pipeline.gradients.landing import GradientPiece, Pieces, lay_out_gradients, unit_of
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.gradients.unaveraged import Unaveraged
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Averaged(NamedTuple):
    """Gradients that have had their turn.

    Attributes:
        weights: Whose they are: a unit's in its order, or any.
        piece: Where they lie.
        tensors: They themselves.
    """

    weights: list[Weight]
    piece: GradientPiece
    tensors: list[Tensor]


class Averaging:
    """Averages the gradients of an arrangement's weights.

    Args:
        replicas: The processes.
        weights: All weights, in an order that is the same in all processes.
        elsewhere: Parameters that autograd itself collects gradients of, on the device.
        moment: What has to be the same in all processes whenever gradients are averaged: a number of steps.

    Attributes:
        replicas: See above.
        unaveraged: Sums of earlier micro-batches, on the host.
    """

    def __init__(
        self,
        replicas: Replicas,
        weights: Iterable[Weight],
        elsewhere: Sequence[nn.Parameter],
        moment: Callable[[], int],
    ) -> None:
        self.replicas = replicas
        self._weights = list(weights)
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        self._elsewhere = elsewhere
        self._agreement = Agreement(len(self._weights) + len(elsewhere), moment, self._exchange)
        self._late: list[int] = []
        self._under_way: tuple[Averaged, list[dist.Work]] | None = None
        self.unaveraged: Unaveraged
        self._gathered: Mapping[Unit, dict[Weight, Tensor]]
        self._pieces: Pieces

    def work_with(self, unaveraged: Unaveraged, gathered: Mapping[Unit, dict[Weight, Tensor]], pieces: Pieces) -> None:
        """Take note of what is there besides what `average` is given.

        Args:
            unaveraged: Sums of earlier micro-batches, on the host.
            gathered: Gradients that have not left the device: they are taken when another process has their turn.
            pieces: Memory in which gradients are put together, and leave.
        """
        self.unaveraged, self._gathered, self._pieces = unaveraged, gathered, pieces

    # ------------------------------------------------------------------------------------------- while backward runs

    def is_due(self, weight: Weight) -> bool:
        """Whether a gradient is averaged in this backward pass, and not with that of a later micro-batch."""
        return not self.replicas.accumulates or bool(tensor_hooks(weight.master))

    def average(self, gradients: Mapping[Weight, Tensor]) -> Iterator[Averaged]:
        """Have gradients averaged while backward goes on.

        Args:
            gradients: On the device. They are not changed.

        Yields:
            What has been averaged since the last call: as a rule what was given then.
        """
        left = dict(gradients)
        while left:
            yield from self._complete()
            self._start(self._agree(left, goes_on=True), left)

    def is_final(self, weights: Iterable[Weight]) -> bool:
        """Whether no process can come to these weights any more in this backward pass, once their turn has come."""
        return self._agreement.is_final(self._numbers[weight] for weight in weights)

    # ------------------------------------------------------------------------------------------------ when it ends

    def finish(self, sparse: Collection[Weight]) -> Iterator[Averaged]:
        """Backward is over in this process: take part until it is over in all of them.

        Args:
            sparse: Weights that this process has sparse gradients of.

        Yields:
            What has been averaged since the last call.
        """
        self.replicas.passes += 1
        late = [self._numbers[weight] for weight in sparse]
        if not self.replicas.accumulates:
            first = len(self._weights)
            late += [first + index for index, other in enumerate(self._elsewhere) if other.grad is not None]
        while turn := self._agree(self._sums_that_are_due(), late, goes_on=False):
            yield from self._complete()
            self._start(turn, {})
        yield from self._complete()
        self._agreement.end()

    def _sums_that_are_due(self) -> list[Weight]:
        """Those that the last micro-batch has added nothing to."""
        return [] if self.replicas.accumulates else self.unaveraged.among(self._weights)

    def average_sparse(self, gradients: Mapping[Weight, list[Tensor]]) -> dict[Weight, list[Tensor]]:
        """Average sparse gradients, when backward is over in all processes.

        Args:
            gradients: For each weight what backward has brought, one after the other.
        """
        averaged = {}
        for weight in [self._weights[number] for number in self._late if number < len(self._weights)]:
            own = reduce(torch.add, gradients[weight]).to("cpu") if weight in gradients else _no_rows(weight)
            part = own.coalesce() * (1 / self.replicas.count)
            dist.all_reduce(part, group=self.replicas.host_group)
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
        first = len(self._weights)
        for parameter in [self._elsewhere[number - first] for number in self._late if number >= first]:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            average = (own * (1 / self.replicas.count)).contiguous()
            dist.all_reduce(average)
            parameter.grad = own.copy_(average)

    def abandon(self) -> None:
        """After an exception: nothing is on its way any more."""
        if self._under_way is not None:
            self._pieces.discard(self._under_way[0].piece)  # others may still write to it
            self._under_way = None
        self._agreement.end()
        self.unaveraged.forget()

    # --------------------------------------------------------------------------------------------------------- a turn

    def _agree(self, mine: Iterable[Weight], late: Iterable[int] = (), *, goes_on: bool) -> list[Weight]:
        """Whose gradients are averaged next; nobody's when no process has any left."""
        turn = self._agreement.next_turn([self._numbers[weight] for weight in mine], late, goes_on=goes_on)
        self._late = turn.late
        return [self._weights[number] for number in turn.weights]

    def _exchange(self, message: Tensor) -> list[Tensor]:
        answers = [torch.empty_like(message) for _ in range(self.replicas.count)]
        dist.all_gather(answers, message, group=self.replicas.host_group)
        return answers

    def _start(self, turn: list[Weight], left: dict[Weight, Tensor]) -> None:
        """Put a turn's gradients together, and have them averaged.

        Args:
            turn: Whose turn it is.
            left: What this process has to give; what is taken is removed.
        """
        sums = self.unaveraged.take(turn)
        parts = [
            [found.pop(weight) for found in (sums, self._others_gathered(weight), left) if weight in found]
            for weight in turn
        ]
        dtypes = [weight.master.dtype for weight in turn]
        nbytes = lay_out_gradients(turn, dtypes).nbytes
        piece = self._pieces.take(nbytes) if unit_of(turn) is not None else self._pieces.make(nbytes)
        tensors = piece.tensors(turn, dtypes)
        _put_in(tensors, parts)
        works = []
        for flat in piece.flat(turn, dtypes):
            flat.mul_(1 / self.replicas.count)
            works.append(dist.all_reduce(flat, async_op=True))
        self._under_way = Averaged(turn, piece, tensors), works

    def _complete(self) -> Iterator[Averaged]:
        if self._under_way is not None:
            (averaged, works), self._under_way = self._under_way, None
            for work in works:
                work.wait()
            yield averaged

    def _others_gathered(self, weight: Weight) -> dict[Weight, Tensor]:
        """What a unit that has not left yet has gathered, if it may be taken."""
        return self._gathered.get(weight.unit, {}) if self.is_due(weight) else {}


def _put_in(targets: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Write sums of gradients to memory; of a weight that this process has not used, zeros."""
    used = [target for target, own in zip(targets, parts, strict=True) if own]
    if used:
        torch._foreach_copy_(used, [own[0] for own in parts if own])
    for target, own in zip(targets, parts, strict=True):
        if not own:
            target.zero_()
        for further in own[1:]:
            target.add_(further.to(target.dtype))


def _no_rows(weight: Weight) -> Tensor:
    """The part of a process that has not used a weight whose gradient is sparse."""
    rows, *columns = weight.host.shape
    values = torch.empty(0, *columns, dtype=weight.master.dtype)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), values, (rows, *columns))
