"""Sums of micro-batches that were not averaged over processes yet, and their way back to the device.

As under torch's DDP, the sum of all micro-batches is averaged, and not each micro-batch, which would round differently.
So each process adds gradients up on its host. In the backward of the last micro-batch the sums go to the device once
more: those of a unit with one host-to-device (H2D) copy, while backward runs through the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class _Fetched(NamedTuple):
    """Sums of a unit that are on the device, or on their way there."""

    tensors: dict[Weight, Tensor]
    tickets: list[Ticket]


class Unaveraged:
    """The sums of this process alone.

    Args:
        replicas: Knows which gradients are such sums; like the sums, it outlives an arrangement.
        gradients: The gradients on the host.
        backend: Copies the sums to the device.
        stats: Counters.
    """

    def __init__(self, replicas: Replicas, gradients: HostGradients, backend: Backend, stats: Stats) -> None:
        self._replicas = replicas
        self._gradients = gradients
        self._backend = backend
        self._stats = stats
        self._fetched: dict[Unit, _Fetched] = {}

    def note(self, weights: Iterable[Weight]) -> None:
        """Note that gradients of these weights go to the host without being averaged."""
        self._replicas.summed_here.update(id(weight.master) for weight in weights)

    def among(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return those of these weights whose gradient is such a sum."""
        known = self._replicas.summed_here
        return [w for w in weights if id(w.master) in known and self._gradients.get(w) is not None]

    def fetch(self, unit: Unit) -> None:
        """Start to copy the sums of a unit that backward has reached: it needs them when it leaves the unit."""
        if self._replicas.accumulates or unit in self._fetched:
            return
        weights = self.among(unit.weights)
        if weights:
            self.forget()
            self._fetched[unit] = self._start(unit, weights)

    def take(self, weights: Sequence[Weight]) -> dict[Weight, Tensor]:
        """Return the sums of these weights on the device, to be averaged; the host forgets them."""
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
        self._replicas.summed_here.difference_update(id(weight.master) for weight in weights)
        return taken

    def forget(self) -> None:
        """Forget what was fetched, as it is not needed."""
        while self._fetched:
            self._wait_for(self._fetched.popitem()[1])  # before the memory is given to anybody else

    def _start(self, unit: Unit, weights: list[Weight]) -> _Fetched:
        """Start copies to the device, in the dtypes of the sums."""
        self._gradients.apply_pending(weights)
        sums = [total for total in map(self._gradients.get, weights) if total is not None]
        layout = GradientLayout(tuple(weights), tuple(total.dtype for total in sums))
        memory = self._backend.allocate(layout.nbytes)
        tensors = layout.tensors_in(memory)
        together, after = self._gradients.memory_of(unit, sums), None
        if together is not None:
            pairs = [(memory[: layout.norms_at], together[: layout.norms_at])]
            after = self._when_landed(weights)
        else:  # somebody has set a `.grad`, or some weights of the unit have none
            self._gradients.wait_until_landed(weights)
            pairs = [(as_bytes(to), as_bytes(_laid_out_as(to, total))) for to, total in zip(tensors, sums, strict=True)]
        tickets = []
        for target, source in pairs:
            tickets.append(self._backend.upload(target, source, after))
            self._backend.trace.moved(Kind.SUMS, unit.name, source.nbytes, tickets[-1])
            self._stats.bytes_to_device += source.nbytes
        return _Fetched(dict(zip(weights, tensors, strict=True)), tickets)

    def _when_landed(self, weights: Sequence[Weight]) -> Ticket | None:
        """Return a ticket for the copies to wait for, so that the host need not; None if nothing is on its way."""
        tickets = self._gradients.tickets_of(weights)
        return self._backend.work(lambda: None, tickets) if len(tickets) > 1 else next(iter(tickets), None)

    def _wait_for(self, fetched: _Fetched) -> None:
        for ticket in fetched.tickets:
            self._backend.trace.wait(ticket, "gradients")

    def check_averaged(self, weights: Iterable[Weight]) -> None:
        """Check that the gradients of weights that are about to be stepped were averaged.

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
