"""Gradients on the host, of whoever reads them: where they are, and what is still to be done to them.

[Note: gradients that nobody has asked for yet]
When backward ends, its last gradients are still on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded until then, so that whoever touches one makes `settle` run first. A
gradient that arrived in a lower dtype than its master's stays as it came, at half the memory: the optimizer casts it
as it reads it. It becomes the master's `.grad` (`show`) only when somebody asks for that. Clipping and unscaling are
noted, and done by who reads a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.homes import Homes
from sp_lightning.pipeline.gradients.scaling import NO_SCALING, Scaling
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class HostGradients:
    """The gradients of masters.

    Args:
        homes: Where they stay.
        backend: Brings them.
        stats: Counters.
    """

    def __init__(self, homes: Homes, backend: Backend, stats: Stats) -> None:
        self._homes = homes
        self._backend = backend
        self._stats = stats
        self._low: dict[Weight, Tensor] = {}
        self._norms: dict[Weight, Tensor] = {}
        self._scaling: dict[Weight, Scaling] = {}
        self._under_way: dict[Weight, Ticket] = {}

    # ------------------------------------------------------------------------------------------- for who brings them

    def keep(self, weight: Weight, gradient: Tensor) -> None:
        """This is a weight's gradient from now on; it may still have to land."""
        if gradient.dtype == weight.master.dtype:
            weight.master.grad = gradient
        else:
            self._low[weight] = gradient

    def taken_into_sum(self, weight: Weight) -> None:
        """What came in a lower dtype has become part of a sum, which is kept in its place."""
        self._low.pop(weight, None)

    def measured(self, norms: dict[Weight, Tensor]) -> None:
        """Norms of gradients, which have landed when the gradients have."""
        self._norms.update(norms)

    def forget_norms(self, weights: Iterable[Weight]) -> None:
        """These gradients are not what was measured."""
        for weight in weights:
            self._norms.pop(weight, None)

    def expect_more(self, weights: Sequence[Weight]) -> None:
        """Others are coming: what is noted is to be done to those that are there, not to the sum."""
        self.forget_norms(weights)
        for weight in weights:
            if weight in self._scaling:
                self.settle()
                self.show(weight)

    def wait_for(self, weights: Sequence[Weight], ticket: Ticket) -> None:
        """Whoever reads these gradients has to wait for this, too, which comes after all that is on its way."""
        self._under_way.update(dict.fromkeys(weights, ticket))

    def let_land(self, weights: Sequence[Weight]) -> None:
        """Wait until nothing is on its way to these gradients; for what nobody waited for, that was dropped."""
        for weight in weights:
            if weight in self._under_way:
                self._under_way.pop(weight).join()

    def abandon(self) -> None:
        """After an exception: nothing is on its way any more."""
        for ticket in self._under_way.values():
            with contextlib.suppress(Exception):  # a copy that failed has been told of, or belongs to what failed
                ticket.join()
        self._under_way.clear()

    # ------------------------------------------------------------------------------------------- for who reads them

    def get(self, weight: Weight) -> Tensor | None:
        """The gradient in the dtype in which it came, or the sum in the master's; it may still have to land."""
        return self._low.get(weight, weight.master.grad)

    def memory_of(self, unit: Unit, gradients: Sequence[Tensor]) -> Tensor | None:
        """Where these gradients of a unit lie together as they travel; None if they do not."""
        return self._homes.memory_of(unit, gradients)

    def take(self, weight: Weight) -> tuple[Tensor, Scaling]:
        """A gradient for the optimizer, which writes what is to be done to it back if it is in the master's dtype."""
        gradient = self.get(weight)
        assert gradient is not None
        self._norms.pop(weight, None)
        scaling = self.scaling_of(weight)
        if weight not in self._low:
            self._scaling.pop(weight, None)
        return gradient, scaling

    def on_its_way(self, weights: Iterable[Weight]) -> list[Ticket]:
        """What has to be waited for before the gradients of these weights may be read."""
        return list(dict.fromkeys(self._under_way[weight] for weight in weights if weight in self._under_way))

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        if self._under_way:
            self._stats.host_syncs += 1
            for ticket in dict.fromkeys(self._under_way.values()):
                self._backend.synchronize(ticket)
            self._under_way.clear()

    @property
    def settled(self) -> bool:
        """Whether `.grad` of all masters is plain training's, and it makes no difference who reads or changes it."""
        return not (self._under_way or self._low or self._scaling or self._norms)

    def show(self, weight: Weight) -> None:
        """Make the gradient the master's `.grad`, in the master's dtype, with all that was to be done to it."""
        self._norms.pop(weight, None)
        low = self._low.pop(weight, None)
        scaling = self._scaling.pop(weight, None)  # before `.grad` is set: the guard may take that for somebody else's
        with torch.inference_mode(False), torch.no_grad():
            if low is not None:
                weight.master.grad = self._homes.room_for(weight).copy_(low)
            if scaling is not None and weight.master.grad is not None:
                scaling.apply_(weight.master.grad)

    def show_all(self) -> None:
        """Wait for all gradients and show them."""
        self.settle()
        for weight in {**self._low, **self._scaling}:
            self.show(weight)

    def drop(self, weight: Weight) -> None:
        """Forget a gradient: somebody sets `.grad`."""
        self._low.pop(weight, None)
        self._norms.pop(weight, None)
        self._scaling.pop(weight, None)

    # ----------------------------------------------------------------------------- what is to be done to gradients

    def norms_of(self, weights: Sequence[Weight]) -> list[Tensor] | None:
        """The norms of gradients as they came, to be read when these have landed; None if one is not known."""
        norms = [self._norms.get(weight) for weight in weights]
        known = [norm for norm in norms if norm is not None]
        return known if len(known) == len(norms) else None

    def multiply(self, weights: Sequence[Weight], factor: Tensor) -> None:
        """Have gradients multiplied by a number, when the optimizer reads them or somebody else does."""
        self._rescale(weights, lambda scaling: scaling.times(factor))

    def clamp(self, weights: Sequence[Weight], limit: float) -> None:
        """Have gradients clipped to plus and minus a limit, when they are read."""
        self._rescale(weights, lambda scaling: scaling.clamped(limit))

    def _rescale(self, weights: Sequence[Weight], change: Callable[[Scaling], Scaling]) -> None:
        changed: dict[int, Scaling] = {}  # weights that are treated alike share an object
        for weight in weights:
            if self.scaling_of(weight).clamp is not None:  # a scaling clips last
                self.settle()
                self.show(weight)
            before = self.scaling_of(weight)
            self._scaling[weight] = changed.setdefault(id(before), change(before))

    def scaling_of(self, weight: Weight) -> Scaling:
        """What is still to be done to a gradient."""
        return self._scaling.get(weight, NO_SCALING)
