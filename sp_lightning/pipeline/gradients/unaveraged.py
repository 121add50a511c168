"""Sums of micro-batches that no other process has had a part in yet: what they are, and how they are averaged.

As under torch's DDP, the sums of micro-batches are averaged, with the last one, and not each micro-batch: other sums
would round otherwise. So until then gradients are added up on the host of each process. With the last micro-batch's
they go to the device once more: a unit's, with one copy, while backward runs through the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.landing import TensorsIn, lay_out_gradients
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.transfer.trace import Kind
from sp_lightning.pipeline.weights.host import as_bytes
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class _Fetched(NamedTuple):
    """Sums of a unit on the device, or on their way there."""

    tensors: dict[Weight, Tensor]
    tickets: list[Ticket]


class Unaveraged:
    """The sums of this process alone.

    Args:
        replicas: Knows which gradients are such sums; it outlives an arrangement, as they do.
        gradients: Those on the host.
        backend: Brings them back to the device.
        stats: Counters.
    """

    def __init__(self, replicas: Replicas, gradients: HostGradients, backend: Backend, stats: Stats) -> None:
        self._replicas = replicas
        self._gradients = gradients
        self._backend = backend
        self._stats = stats
        self._fetched: dict[Unit, _Fetched] = {}

    def note(self, weights: Iterable[Weight]) -> None:
        """Gradients of these go to the host as they are."""
        self._replicas.unaveraged.update(id(weight.master) for weight in weights)

    def among(self, weights: Iterable[Weight]) -> list[Weight]:
        """Those of these weights that have such a sum."""
        known = self._replicas.unaveraged
        return [w for w in weights if id(w.master) in known and self._gradients.get(w) is not None]

    def fetch(self, unit: Unit) -> None:
        """Backward has come to a unit: its sums are needed on the device when it leaves it."""
        if self._replicas.accumulates or unit in self._fetched:
            return
        weights = self.among(unit.weights)
        if weights:
            self.forget()
            self._fetched[unit] = self._start(unit, weights)

    def take(self, weights: Sequence[Weight]) -> dict[Weight, Tensor]:
        """The sums of these weights, on the device. They are not on the host any more, and will be averaged."""
        taken = {}
        summed = self.among(weights)
        for unit in dict.fromkeys(weight.unit for weight in summed):
            own = [weight for weight in summed if weight.unit is unit]
            if unit not in self._fetched or not self._fetched[unit].tensors.keys() >= set(own):
                self.forget()
                self._fetched[unit] = self._start(unit, own)
            fetched = self._fetched.pop(unit)
            self._wait_for(fetched)
            taken.update({weight: fetched.tensors[weight] for weight in own})
        for weight in summed:
            self._gradients.drop(weight)
            weight.master.grad = None
        self._replicas.unaveraged.difference_update(id(weight.master) for weight in weights)
        return taken

    def forget(self) -> None:
        """What was fetched is not needed."""
        while self._fetched:
            self._wait_for(self._fetched.popitem()[1])  # before the memory is anybody's

    def _start(self, unit: Unit, weights: list[Weight]) -> _Fetched:
        """Start copies to the device, in the dtypes in which the sums are."""
        self._gradients.expect_more(weights)
        sums = [total for total in map(self._gradients.get, weights) if total is not None]
        dtypes = [total.dtype for total in sums]
        layout = lay_out_gradients(weights, dtypes)
        memory = TensorsIn(self._backend.allocate(layout.nbytes))
        tensors = memory.tensors(weights, dtypes)
        together, after = self._gradients.memory_of(unit, sums), None
        if together is not None:
            pairs = [(memory.memory[: layout.norms_at], together[: layout.norms_at])]
            after = self._when_landed(weights)
        else:  # somebody has set a gradient, or some weights of the unit have none
            self._gradients.let_land(weights)
            pairs = [(as_bytes(to), as_bytes(_laid_out_as(to, total))) for to, total in zip(tensors, sums, strict=True)]
        tickets = []
        for target, source in pairs:
            tickets.append(self._backend.upload(target, source, after))
            self._backend.trace.moved(Kind.SUMS, unit.name, source.nbytes, tickets[-1])
            self._stats.bytes_to_device += source.nbytes
        return _Fetched(dict(zip(weights, tensors, strict=True)), tickets)

    def _when_landed(self, weights: Sequence[Weight]) -> Ticket | None:
        """What a copy of sums has to wait for, so that the host does not."""
        tickets = self._gradients.on_its_way(weights)
        return self._backend.work(lambda: None, tickets) if len(tickets) > 1 else next(iter(tickets), None)

    def _wait_for(self, fetched: _Fetched) -> None:
        for ticket in fetched.tickets:
            self._backend.trace.wait(ticket, "gradients")

    def check_averaged(self, weights: Iterable[Weight]) -> None:
        """Called before weights are stepped.

        Raises:
            RuntimeError: A gradient is the sum of this process alone.
        """
        for weight in self.among(weights):
            raise RuntimeError(
                f"The gradient of {weight.name!r} would be stepped before it was averaged over processes, because "
                "the last micro-batch of the step had no backward. `training_step` may not return None there."
            )


def _laid_out_as(like: Tensor, total: Tensor) -> Tensor:
    return total if total.stride() == like.stride() else torch.empty_like(like, device=total.device).copy_(total)
