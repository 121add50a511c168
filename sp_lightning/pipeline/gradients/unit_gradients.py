"""The gradients of one unit: the state that they are in, and the host memory that they stay in until somebody asks.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Whoever reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import GradientLayout, HostGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class Scaling:
    """Operations on a gradient between backward and the update."""

    # factors to multiply by, one after the other: the inverse of a loss scale, a clipping factor
    factors: tuple[float | Tensor, ...] = ()
    clamp: float | None = None  # the largest absolute value to leave after that; None not to clip by value

    def without_ones(self) -> Scaling:
        """Return the same scaling without factors of one."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    def times(self, factor: float | Tensor) -> Scaling:
        """Return this scaling with one more factor."""
        return Scaling((*self.factors, factor), self.clamp)

    def apply_(self, gradient: Tensor) -> None:
        """Scale in place, bit for bit as `GradScaler.unscale_`, `clip_grad_norm_` and `clip_grad_value_` do."""
        for factor in self.factors:
            gradient.mul_(factor)
        if self.clamp is not None:
            gradient.clamp_(-self.clamp, self.clamp)


NO_SCALING = Scaling()


class State(enum.Enum):
    """Where the gradients of a unit are."""

    EMPTY = enum.auto()
    """The engine has none."""

    GATHERING = enum.auto()
    """Backward has brought some, which are on the device."""

    LEAVING = enum.auto()
    """They are on their way to the host, or into a sum there."""

    LANDED = enum.auto()
    """They are on the host."""

    CONSUMED = enum.auto()
    """An optimizer has stepped the unit with them in backward; its `step()` has yet to be called."""


class Gradient:
    """The gradient of one weight."""

    __slots__ = ("host", "is_seen", "late", "norm", "on_device", "scaling", "unit", "weight")

    def __init__(self, weight: Weight, unit: UnitGradients) -> None:
        self.weight = weight
        self.unit = unit
        self.on_device: Tensor | None = None  # what backward has brought, as long as it has not left
        # what the engine has on the host: as it came, or a sum in the master's dtype. It may not have landed yet.
        self.host: Tensor | None = None
        self.norm: Tensor | None = None  # the norm of that; None if it is not known
        self.scaling: Scaling = NO_SCALING  # unscaling and clipping still to be applied to it
        # whether somebody would see how it is added up: it has a `.grad` of the user's, or hooks to call
        self.is_seen = False
        self.late: list[Tensor] = []  # what is added to `.grad` when backward has ended, as it is seen


IS_TRAINED = attrgetter("weight.master.requires_grad")


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        layout: How these lie in memory, in the dtypes in which they arrive.
    """

    def __init__(self, unit: Unit, backend: Backend) -> None:
        self.unit = unit
        self._backend = backend
        self.gradients = [Gradient(weight, self) for weight in unit.weights]  # that of each of its weights
        self.trained: list[Gradient] = []  # those of weights that require one, in this backward pass
        self.layout = self._sum_layout = GradientLayout((), ())
        self.state = State.EMPTY
        self.gathered = 0  # how many of them backward has brought that have not left
        # comes after everything that is on its way to them; None if nothing is known to be
        self.ticket: Ticket | None = None
        self._own: HostGradients | None = None  # for gradients as they arrive
        # host memory for sums in the masters' dtypes, where gradients arrive in lower ones; None before there are
        self.sums: HostGradients | None = None

    def begin(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        trained = list(filter(IS_TRAINED, self.gradients))
        if trained != self.trained:
            self.close()
            self.trained = trained
            weights = [gradient.weight for gradient in trained]
            self.layout = GradientLayout(weights, [weight.gradient_dtype for weight in weights])
            self._sum_layout = GradientLayout(weights, [weight.dtype for weight in weights])

    def own(self) -> HostGradients:
        """Return the memory in which gradients stay as they arrive."""
        if self._own is None:
            self._own = HostGradients(self.layout.nbytes, self._backend, pin=True)
        return self._own

    def take_own(self) -> HostGradients | None:
        """Give away that memory, if there is some, to be closed when nobody needs it."""
        own, self._own = self._own, None
        return own

    def room_for(self, gradient: Gradient, dtype: torch.dtype) -> Tensor:
        """Return memory for the sum of one weight's gradients, or for the first of them, which came in this dtype."""
        index = self.trained.index(gradient)
        is_first = gradient.host is None and self.sums is None and dtype == self.layout.dtypes[index]
        if is_first or not self.layout.is_lower:
            return self.own().views(self.layout)[0][index]
        if self.sums is None:
            self.sums = HostGradients(self._sum_layout.nbytes, self._backend, pin=False)
        return self.sums.views(self._sum_layout)[0][index]

    def show(self, gradient: Gradient) -> None:
        """Make what has landed of a gradient the master's `.grad`, which is the user's."""
        if gradient.host is None:
            return
        self.wait()
        with torch.inference_mode(False), torch.no_grad():
            shown = torch.empty_like(gradient.weight.host).copy_(gradient.host)
            gradient.scaling.apply_(shown)
        self.forget([gradient])
        gradient.weight.master.grad = shown

    def forget(self, gradients: Iterable[Gradient]) -> None:
        """Forget what the engine has of these on the host, which may be all that it has of the unit."""
        for gradient in gradients:
            gradient.host = gradient.norm = None
            gradient.scaling = NO_SCALING
        if self.state is State.CONSUMED:
            return
        for gradient in self.gradients:
            if gradient.host is not None:
                return
        self.state = State.EMPTY

    def wait(self) -> None:
        """Block until nothing is on its way to the gradients, not even to those that were dropped before.

        Raises:
            Exception: Whatever a copy or an addition raised.
        """
        ticket = self.ticket
        if ticket is None:
            return
        try:
            ticket.join()
        finally:
            if ticket.done:  # not if an interrupt has ended the wait
                self.ticket = None
                if self.state is State.LEAVING:
                    self.state = State.LANDED

    def host_bytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(memory.bytes.nbytes for memory in (self._own, self.sums) if memory is not None)

    def close(self) -> None:
        """Let go of the memory; what lies in it keeps it."""
        self.wait()
        for memory in (self._own, self.sums):
            if memory is not None:
                memory.close()
        self._own = self.sums = None


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host."""

    unit: UnitGradients
    gradients: Sequence[Gradient]  # those that are on their way
    arrived: Sequence[Tensor]  # the tensors that they land in
    ticket: Ticket  # the copy, or the addition, that brings them
    # the landing buffer to release when they have been read; None if they land where they stay
    buffer: HostGradients | None


class Taker(Protocol):
    """What takes gradients as soon as they arrive, in backward: an optimizer's step that has begun (`EarlyStep`)."""

    keeps_gradients: bool  # whether somebody reads them after the step

    def wants(self, unit: UnitGradients) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""

    def take(self, shipment: Shipment) -> None:
        """Step the unit when its gradients have landed, and release the landing buffer; or give them back."""

    def finish_backward(self) -> None:
        """Give back what was not used."""


def refusal(weight: Weight, tensor: Tensor) -> RuntimeError:
    """Make the error for a gradient that cannot be sent."""
    if tensor.requires_grad:
        return RuntimeError(
            f"backward(create_graph=True) would leave a gradient with a graph on weight {weight.name!r}, whose "
            "gradient lives on the host. Use torch.autograd.grad(..., create_graph=True) for the inner gradient."
        )
    if tensor.layout is not torch.strided:
        return RuntimeError(
            f"Weight {weight.name!r} got a sparse gradient. Let it be dense (`sparse=False`), or compute it in an "
            "`nn.Embedding(sparse=True)`, which lives on the device."
        )
    return RuntimeError(
        f"Weight {weight.name!r} got another gradient after it was stepped in this backward pass. Train with "
        "`overlap_optimizer=False`."
    )


_CHUNK = 1 << 18  # elements cast and added at once: they stay in the cache in between


def add_up(target: Tensor, before: Tensor | None, arrived: Tensor) -> None:
    """Write the sum of two gradients, the first of which may be there already, to where it stays."""
    if before is None:
        target.copy_(arrived)
        return
    if before is not target:
        target.copy_(before)
    if target.dtype == arrived.dtype or target.stride() != arrived.stride():
        target.add_(arrived)
        return
    count = arrived.numel()
    flat_target, flat_arrived = target.as_strided((count,), (1,)), arrived.as_strided((count,), (1,))
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        flat_target[start:end].add_(flat_arrived[start:end].to(target.dtype))
