"""The gradients of one unit: the state that they are in, and the host memory that they stay in until somebody asks.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Whoever reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.layout import GradientLayout
from sp_lightning.pipeline.gradients.scaling import NO_SCALING, Scaling
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


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
    """The gradient of one weight.

    Attributes:
        weight: The weight.
        unit: The gradients of its unit.
        dtype: The dtype in which it arrives.
        on_device: What backward has brought, as long as it has not left.
        host: What the engine has on the host: as it came, or a sum in the master's dtype. It may not have landed yet.
        norm: The norm of that; None if it is not known.
        scaling: Unscaling and clipping still to be applied to it.
        under_way: Whether the backward that is running has brought some of it, so that nobody can read it yet.
        is_seen: Whether somebody would see how it is added up: it has a `.grad` of the user's, or hooks to call.
        late: What is added to `.grad` when backward has ended, for that reason.
    """

    __slots__ = ("dtype", "host", "is_seen", "late", "norm", "on_device", "scaling", "under_way", "unit", "weight")

    def __init__(self, weight: Weight, unit: UnitGradients) -> None:
        self.weight = weight
        self.unit = unit
        self.dtype = weight.gradient_dtype
        self.on_device: Tensor | None = None
        self.host: Tensor | None = None
        self.norm: Tensor | None = None
        self.scaling: Scaling = NO_SCALING
        self.under_way = False
        self.is_seen = False
        self.late: list[Tensor] = []

    def look(self) -> None:
        """Find out whether somebody would see how it is added up."""
        master = self.weight.master
        self.is_seen = bool(master.grad is not None or master._backward_hooks or master._post_accumulate_grad_hooks)

    def forget(self) -> None:
        """Forget what the engine has on the host."""
        self.host = self.norm = None
        self.scaling = NO_SCALING

    def show(self) -> None:
        """Make what has landed the master's `.grad`, which is the user's."""
        if self.host is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            shown = torch.empty_like(self.weight.host).copy_(self.host)
            self.scaling.apply_(shown)
        self.forget()
        self.weight.master.grad = shown


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        unit: The unit.
        gradients: That of each of its weights.
        trained: Those of weights that require one, in this backward pass.
        layout: How these lie in memory.
        state: Where they are.
        gathered: How many of them backward has brought that have not left.
        ticket: Comes after everything that is on its way to them; None if nothing is known to be.
        is_new: Whether all that the engine has of them on the host is from the backward pass that is running.
        sums: Host memory for sums in the masters' dtypes, where gradients arrive in lower ones; None before there are.
    """

    def __init__(self, unit: Unit, backend: Backend, pin: bool) -> None:
        self.unit = unit
        self._backend = backend
        self._pin = pin
        self.gradients = [Gradient(weight, self) for weight in unit.weights]
        self.trained: list[Gradient] = []
        self.layout = GradientLayout((), ())
        self.state = State.EMPTY
        self.gathered = 0
        self.ticket: Ticket | None = None
        self.is_new = False
        self._own: HostBuffer | None = None  # for gradients as they arrive
        self._views: list[Tensor] = []
        self._norms: list[Tensor] = []
        self.sums: HostBuffer | None = None
        self._sum_views: dict[Gradient, Tensor] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether none of its weights requires a gradient."""
        return not any(gradient.weight.master.requires_grad for gradient in self.gradients)

    def begin(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        trained = [gradient for gradient in self.gradients if gradient.weight.master.requires_grad]
        if trained != self.trained:
            self.trained = trained
            self.layout = GradientLayout([g.weight for g in trained], [g.dtype for g in trained])
            self._outgrow()

    def _outgrow(self) -> None:
        """Let go of memory for other gradients; what lies in it keeps it."""
        self.wait()
        for buffer in (self._own, self.sums):
            if buffer is not None:
                buffer.release()
        self._own = self.sums = None
        self._views, self._norms, self._sum_views = [], [], {}

    def own(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the memory in which gradients stay as they arrive, its views as gradients, and those as norms."""
        if self._own is None:
            self._own = HostBuffer(self.layout.nbytes, self._backend, self._pin)
            self._views = self.layout.tensors_in(self._own.bytes)
            self._norms = list(self.layout.norms_in(self._own.bytes).unbind())
        return self._own.bytes, self._views, self._norms

    def room_for(self, gradient: Gradient) -> Tensor:
        """Return memory for the sum of one weight's gradients."""
        if not self.layout.is_lower:
            return self.own()[1][self.trained.index(gradient)]
        if self.sums is None:
            layout = GradientLayout.in_master_dtypes(self.layout.weights)
            self.sums = HostBuffer(layout.nbytes, self._backend, pin=False)
            self._sum_views = dict(zip(self.trained, layout.tensors_in(self.sums.bytes), strict=True))
        return self._sum_views[gradient]

    def release_own(self) -> None:
        """Release the memory of gradients as they arrive, which have become parts of sums, unless it is theirs, too."""
        if self.sums is not None:
            self.release_empty()

    def release_empty(self) -> None:
        """Release the memory of gradients as they arrive, in which there is none that is still needed."""
        if self._own is not None:
            self.wait()
            self._own.release()
            self._own = None
            self._views, self._norms = [], []

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
        return sum(buffer.nbytes for buffer in (self._own, self.sums) if buffer is not None)

    def close(self) -> None:
        """Let go of the memory, when nothing is under way."""
        self._outgrow()
