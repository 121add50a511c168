"""Adding up the gradients of a weight: those that arrive in a backward pass, and the one that is there already.

The thread for work on host memory adds while backward runs. Gradients that a user's hook has to see, sparse ones, and
those that are added to what the user has converted, are added when backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import Shipment
from sp_lightning.pipeline.gradients.homes import Homes
from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import tensor_hooks, without_torch_function
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.weight_hooks import run_hooks

_CHUNK = 1 << 18  # elements cast and added at once: they stay in the cache in between


class Sums:
    """Adds up the gradients of one backward pass after the other.

    Args:
        gradients: The gradients that are on the host.
        homes: The memory in which they stay.
        backend: Has the thread for work on host memory.
        stats: Counters.
        replicas: The processes that gradients are averaged with, if there are any.

    Attributes:
        held: Weights with a gradient that is added to, and that somebody else holds, too: they could see when exactly
            it changes, so backward has to wait for the sum.
    """

    def __init__(
        self,
        gradients: HostGradients,
        homes: Homes,
        backend: Backend,
        stats: Stats,
        replicas: Replicas | None = None,
    ) -> None:
        self.held: set[Weight] = set()
        self._gradients = gradients
        self._homes = homes
        self._backend = backend
        self._stats = stats
        self._replicas = replicas
        self._held_back: dict[Weight, list[Tensor]] = {}
        self._totals: dict[Weight, Tensor] = {}

    @property
    def held_back(self) -> KeysView[Weight]:
        """Weights with gradients that are not added before backward has ended."""
        return self._held_back.keys()

    def may_be_used(self, weights: Sequence[Weight]) -> bool:
        """Tell whether the optimizer may use these sums as they arrive: they are complete, and nobody sees them."""
        return self._held_back.keys().isdisjoint(weights) and self.held.isdisjoint(weights)

    def begin(self, weights: Sequence[Weight], gradients: Sequence[Tensor]) -> None:
        """Begin the sums of these weights with `gradients`, as there was nothing to add them to."""
        self._totals.update(zip(weights, gradients, strict=True))

    def add(self, shipment: Shipment, with_norms: bool) -> Shipment:
        """Have gradients that arrive in a landing buffer added to those that are there.

        Args:
            shipment: The gradients that arrive.
            with_norms: Whether to compute the norms of the sums.

        Returns:
            The sums, as a shipment that arrives when they are done.
        """
        assert shipment.buffer is not None
        additions, after = [], [shipment.ticket, *self._gradients.tickets_of(shipment.weights)]
        for weight, arrived in zip(shipment.weights, shipment.arrived, strict=True):
            if self._hooks_of(weight) or _is_other_kind(weight):  # users' hooks must not run in the thread
                self._held_back.setdefault(weight, []).append(torch.empty_like(weight.host))
                additions.append(_Addition(self._held_back[weight][-1], None, arrived, onto=False))
            else:
                additions.append(self._addition(weight, arrived))

        measured = [w for w in shipment.weights if with_norms and w.master.dtype == torch.float32]
        norms = {weight: torch.empty(()) for weight in measured}
        self._gradients.note_norms(norms)

        def job() -> None:
            with without_torch_function(), torch.no_grad():
                for addition in additions:
                    addition.run()
                for weight, addition in zip(shipment.weights, additions, strict=True):
                    if weight in norms:
                        norms[weight].copy_(torch.linalg.vector_norm(addition.target, dtype=torch.float32))

        moved = sum(addition.target.nbytes for addition in additions)
        ticket = self._backend.work(job, after, 2 * moved, shipment.buffer.release)
        self._backend.trace.moved(Kind.ADD, shipment.unit.name, 2 * moved, ticket)
        return Shipment(shipment.unit, shipment.weights, [addition.target for addition in additions], ticket, None)

    def _addition(self, weight: Weight, arrived: Tensor) -> _Addition:
        total = self._totals.get(weight)
        if total is None:
            total = self._gradients.get(weight)
        if total is not None and total.dtype == weight.master.dtype and not self._homes.is_in_lower(weight, id(total)):
            if not self._homes.is_only_shown(weight, id(total)):
                self._gradients.wait_until_landed([weight])  # an addition that is under way holds it, too
                if not self._homes.is_only_shown(weight, id(total)):
                    self.held.add(weight)
            self._totals[weight] = total
            return _Addition(total, None, arrived, onto=True)
        self._gradients.forget_lower(weight)
        room = self._homes.room_for(weight)
        self._totals[weight] = room
        return _Addition(room, total, arrived, onto=total is not None)

    def conclude(self, weight: Weight, sparse: Sequence[Tensor]) -> None:
        """Add what was held back until backward has ended, and make the sum the weight's gradient.

        Args:
            weight: The weight.
            sparse: Its sparse gradients.
        """
        for gradient in self._held_back.get(weight, ()):
            self._add_now(weight, run_hooks(self._hooks_of(weight), gradient))
        for gradient in sparse:
            self._add_sparse(weight, run_hooks(tensor_hooks(weight.master), gradient))
        if weight in self._totals and self._totals[weight] is not weight.master.grad:
            self._gradients.keep(weight, self._totals[weight])

    def _hooks_of(self, weight: Weight) -> list[Callable[[Tensor], Tensor | None]]:
        """Return the user's hooks to run on gradients that arrive: they see averages, and no part of one."""
        replicas = self._replicas
        awaits_average = replicas is not None and replicas.averages and replicas.accumulates
        return [] if awaits_average else tensor_hooks(weight.master)

    def _add_now(self, weight: Weight, gradient: Tensor) -> None:
        total = self._totals.get(weight, weight.master.grad)
        if total is not None and total.layout is not torch.strided:
            self._totals[weight] = gradient + total
        elif total is not None and _is_other_kind(weight):
            total.add_(gradient.to(total.device))  # as autograd does: rounded once, to the dtype of the sum
        else:
            self._addition(weight, gradient).run()

    def _add_sparse(self, weight: Weight, gradient: Tensor) -> None:
        arrived = gradient.to("cpu")
        self._stats.bytes_to_host += arrived._values().nbytes + arrived._indices().nbytes
        if weight in self._totals:
            self._gradients.keep(weight, self._totals.pop(weight))
        self._gradients.show(weight)
        if weight.master.grad is None:
            self._totals[weight] = arrived
        else:
            self._totals[weight] = weight.master.grad.add_(arrived)

    def forget(self) -> None:
        """Forget the sums, as the backward pass is over."""
        self.held.clear()
        self._held_back.clear()
        self._totals.clear()


class _Addition(NamedTuple):
    """The addition of a gradient that arrived to a sum.

    Attributes:
        target: The sum.
        lower_part: The sum so far, if it is in a home for a lower dtype, and has to be written to the target first.
        arrived: The gradient.
        onto: Whether there is a sum to add to; else the gradient is copied.
    """

    target: Tensor
    lower_part: Tensor | None
    arrived: Tensor
    onto: bool

    def run(self) -> None:
        """Add the gradient, or copy it if there is nothing to add to."""
        if self.lower_part is not None:
            self.target.copy_(self.lower_part)
        if self.onto:
            cast_and_add(self.target, self.arrived)
        else:
            self.target.copy_(self.arrived)


def _is_other_kind(weight: Weight) -> bool:
    """Tell whether `.grad` is sparse, or the user has given it another dtype, device or order than the master's."""
    gradient, like = weight.master.grad, weight.host
    if gradient is None or gradient.layout is not torch.strided:
        return gradient is not None
    return (gradient.dtype, gradient.device, gradient.stride()) != (like.dtype, like.device, like.stride())


def cast_and_add(total: Tensor, arrived: Tensor) -> None:
    """Add a gradient to a sum, in pieces that stay in the cache between the cast and the addition."""
    if total.dtype == arrived.dtype or total.stride() != arrived.stride():
        total.add_(arrived)
        return
    count = arrived.numel()
    flat_total = total.as_strided((count,), (1,))
    flat_arrived = arrived.as_strided((count,), (1,))
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        flat_total[start:end].add_(flat_arrived[start:end].to(total.dtype))
