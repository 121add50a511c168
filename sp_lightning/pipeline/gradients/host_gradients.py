"""Gradients on the host until somebody reads them: where they are, and the scaling that is still to be applied.

[Note: gradients that nobody has asked for yet]
When backward ends, its last gradients are still on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded until then, so that `settle` runs before anybody touches one. A gradient
that arrived in a lower dtype than its master's stays as it came, at half the memory: the optimizer casts it as it
reads it. It becomes the master's `.grad` (`show`) only when somebody asks for that. Clipping and unscaling are
recorded, and applied when a gradient is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.homes import Homes
from sp_lightning.pipeline.gradients.scaling import NO_SCALING, Scaling
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class HostGradients:
    """The gradients of masters.

    Args:
        homes: The memory in which they stay.
        backend: Waits for the copies that bring them.
        stats: Counters.
    """

    def __init__(self, homes: Homes, backend: Backend, stats: Stats) -> None:
        self._homes = homes
        self._backend = backend
        self._stats = stats
        self._lower: dict[Weight, Tensor] = {}
        self._norms: dict[Weight, Tensor] = {}
        self._scaling: dict[Weight, Scaling] = {}
        self._under_way: dict[Weight, Ticket] = {}

    # ------------------------------------------------------------------------------------ for the code that brings them

    def keep(self, weight: Weight, gradient: Tensor) -> None:
        """Make `gradient`, which may not have landed yet, the weight's gradient."""
        if gradient.dtype == weight.master.dtype:
            weight.master.grad = gradient
        else:
            self._lower[weight] = gradient

    def forget_lower(self, weight: Weight) -> None:
        """Forget a gradient in a lower dtype that has become part of a sum, which takes its place."""
        self._lower.pop(weight, None)

    def note_norms(self, norms: dict[Weight, Tensor]) -> None:
        """Record the norms of gradients; they land together with the gradients."""
        self._norms.update(norms)

    def forget_norms(self, weights: Iterable[Weight]) -> None:
        """Forget the norms of gradients that no longer are what was measured."""
        for weight in weights:
            self._norms.pop(weight, None)

    def apply_pending(self, weights: Sequence[Weight]) -> None:
        """Apply the recorded scaling to these gradients before others are added: it is not meant for the sum."""
        self.forget_norms(weights)
        for weight in weights:
            if weight in self._scaling:
                self.settle()
                self.show(weight)

    def mark_under_way(self, weights: Sequence[Weight], ticket: Ticket) -> None:
        """Have readers of these gradients wait for `ticket`, which comes after all that is on its way to them."""
        self._under_way.update(dict.fromkeys(weights, ticket))

    def wait_until_landed(self, weights: Sequence[Weight]) -> None:
        """Wait until nothing is on its way to these gradients, not even one that was dropped before it had landed."""
        for weight in weights:
            ticket = self._under_way.get(weight)
            if ticket is None:
                continue
            try:
                ticket.join()
            finally:
                if ticket.done:  # not if an interrupt has ended the wait
                    self._under_way.pop(weight, None)

    def abandon(self) -> None:
        """Wait for all that is on its way, after an exception."""
        for ticket in self._under_way.values():
            with contextlib.suppress(Exception):  # its error was raised already, or is due to the exception
                ticket.join()
        self._under_way.clear()

    # ------------------------------------------------------------------------------------- for the code that reads them

    def get(self, weight: Weight) -> Tensor | None:
        """Return the gradient as it came, or the sum in the master's dtype; it may not have landed yet."""
        return self._lower.get(weight, weight.master.grad)

    def memory_of(self, unit: Unit, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the memory of the unit's home that consists of exactly these gradients; None if there is none."""
        return self._homes.memory_of(unit, gradients)

    def take(self, weight: Weight) -> tuple[Tensor, Scaling]:
        """Return a gradient, and the scaling that the optimizer applies: in place, if it is in the master's dtype."""
        gradient = self.get(weight)
        assert gradient is not None
        self._norms.pop(weight, None)
        scaling = self.scaling_of(weight)
        if weight not in self._lower:
            self._scaling.pop(weight, None)
        return gradient, scaling

    def is_held(self, weight: Weight) -> bool:
        """Tell whether the gradient is the master's `.grad`, and somebody else holds it, too."""
        gradient = self.get(weight)
        is_shown = gradient is not None and gradient is weight.master.grad
        return is_shown and not self._homes.is_only_shown(weight, id(gradient))

    def tickets_of(self, weights: Iterable[Weight]) -> list[Ticket]:
        """Return the tickets to wait for before the gradients of these weights may be read."""
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
        """Whether the `.grad` of all masters is as in plain training, so that anybody may read or change it."""
        return not (self._under_way or self._lower or self._scaling or self._norms)

    def show(self, weight: Weight) -> None:
        """Make the gradient the master's `.grad`, in the master's dtype and scaled."""
        self._norms.pop(weight, None)
        lower = self._lower.pop(weight, None)
        scaling = self._scaling.pop(weight, None)  # before `.grad` is set: the guard may take that for a user's doing
        with torch.inference_mode(False), torch.no_grad():
            if lower is not None:
                weight.master.grad = self._homes.room_for(weight).copy_(lower)
            if scaling is not None and weight.master.grad is not None:
                scaling.apply_(weight.master.grad)

    def show_all(self) -> None:
        """Wait for all gradients, and show them."""
        self.settle()
        for weight in {**self._lower, **self._scaling}:
            self.show(weight)

    def drop(self, weight: Weight) -> None:
        """Forget a gradient, as somebody sets `.grad`."""
        self._lower.pop(weight, None)
        self._norms.pop(weight, None)
        self._scaling.pop(weight, None)

    def drop_all(self, weights: Iterable[Weight]) -> None:
        """Leave these masters without gradients."""
        with without_torch_function():
            for weight in weights:
                self.drop(weight)
                weight.master.grad = None

    # ------------------------------------------------------------------------------------------------ norms and scaling

    def norms_of(self, weights: Sequence[Weight]) -> list[Tensor] | None:
        """Return the norms of gradients as they came, to be read once these have landed; None if one is not known."""
        norms = [self._norms.get(weight) for weight in weights]
        known = [norm for norm in norms if norm is not None]
        return known if len(known) == len(norms) else None

    def multiply(self, weights: Sequence[Weight], factor: Tensor) -> None:
        """Have gradients multiplied by `factor` when the optimizer, or somebody else, reads them."""
        self._rescale(weights, lambda scaling: scaling.times(factor))

    def clamp(self, weights: Sequence[Weight], limit: float) -> None:
        """Have gradients clipped to plus and minus `limit` when they are read."""
        self._rescale(weights, lambda scaling: scaling.clamped(limit))

    def _rescale(self, weights: Sequence[Weight], change: Callable[[Scaling], Scaling]) -> None:
        changed: dict[int, Scaling] = {}  # weights that are scaled alike share an object
        for weight in weights:
            if self.scaling_of(weight).clamp is not None:  # a `Scaling` clips last, so nothing can follow that
                self.settle()
                self.show(weight)
            before = self.scaling_of(weight)
            self._scaling[weight] = changed.setdefault(id(before), change(before))

    def scaling_of(self, weight: Weight) -> Scaling:
        """Return the scaling that is still to be applied to a gradient."""
        return self._scaling.get(weight, NO_SCALING)
