"""The gradients of one segment: the state that they are in, and the host memory that they stay in until asked for.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Whoever reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sp_lightning.optim import rules
from sp_lightning.optim.of_torch import scaling_of
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import GradientLayout, Segment
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class Scaling:
    """Operations on a gradient between backward and the update."""

    # factors to multiply by, one after the other: the inverse of a loss scale, a clipping factor
    factors: tuple[float | Tensor, ...] = ()
    # the largest absolute value to leave after that; None not to clip by value
    clamp: float | None = None

    @cached_property
    def without_ones(self) -> Scaling:
        """The same scaling without factors of one, when they are known; looked at once, as many gradients share it."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    @cached_property
    def _numbers(self) -> dict[torch.dtype, rules.Scaling | None]:
        return {}

    def numbers(self, dtype: torch.dtype) -> rules.Scaling | None:
        """Return it as passes over weights of a dtype take it, when factors are known; None if it is too much."""
        if dtype not in self._numbers:
            self._numbers[dtype] = scaling_of(self.without_ones.factors, self.clamp, dtype)
        return self._numbers[dtype]

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
    """Where the gradients of a segment are."""

    EMPTY = enum.auto()
    """The engine has none."""

    HELD = enum.auto()
    """The engine has some, on the device, on their way to the host, or there."""

    CONSUMED = enum.auto()
    """An optimizer has stepped the unit with them in backward; its `step()` has yet to be called."""


class Gradient:
    """The gradient of one weight."""

    __slots__ = ("norm", "of_segment", "scaling", "tensor", "weight")

    def __init__(self, weight: Weight, of_segment: SegmentGradients) -> None:
        self.weight = weight
        self.of_segment = of_segment
        # what the engine has: as it came, or a sum in the master's dtype. On the host it may not have landed yet.
        self.tensor: Tensor | None = None
        self.norm: Tensor | None = None  # the norm of that, on the host; None if it is not known
        self.scaling: Scaling = NO_SCALING  # unscaling and clipping still to be applied to it

    @property
    def is_seen(self) -> bool:
        """Whether somebody would see how it is added up: it has a `.grad` of the user's, or hooks to call."""
        master = self.weight.master
        if master._backward_hooks or master._post_accumulate_grad_hooks:
            return True
        return master.grad is not None

    def show(self) -> None:
        """Make what has landed of it the master's `.grad`, which is the user's."""
        shown = self.take()
        if shown is not None:
            self.weight.master.grad = shown

    def take(self) -> Tensor | None:
        """Return what has landed of it, which the engine then has no longer; None if there is nothing."""
        if self.tensor is None:
            return None
        self.of_segment.wait()
        with torch.inference_mode(False), torch.no_grad():
            taken = torch.empty_like(self.weight.host).copy_(self.tensor)
            self.scaling.apply_(taken)
        drop([self])
        return taken


def drop(gradients: Collection[Gradient]) -> None:
    """Drop what the engine has of these on the host."""
    for gradient in gradients:
        gradient.tensor = gradient.norm = None
        gradient.scaling = NO_SCALING
    for of_segment in {gradient.of_segment for gradient in gradients}:
        of_segment.note_dropped()


class GradientMemory:
    """Memory for the gradients of one unit; the tensors in it are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        # done when what was put into it last has been copied to the host; None if nothing was
        self.ticket: Ticket | None = None
        self._views: WeakKeyDictionary[GradientLayout, tuple[list[Tensor], Tensor]] = WeakKeyDictionary()

    def views(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
        """Return it as gradients, and as their norms."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.views(self.bytes)
        return found


class SegmentGradients:
    """The gradients of what of a unit is sent together: of its trained weights, or of others that may be trained yet.

    Attributes:
        segment: These weights, and the memory that their masters lie in; gradients lie beside it.
        state: Where they are; the methods below change it, and no one else.
        layout: How these lie in memory, in the dtypes in which they arrive.
        sum_layout: How sums lie in memory, in the masters' dtypes.
        kept_as: How they are kept on the host: as one or the other.
    """

    def __init__(self, unit: Unit, segment: Segment) -> None:
        self.unit = unit
        self.segment = segment
        self.gradients = [Gradient(weight, self) for weight in segment.weights]
        # those of weights that require one, in this backward pass
        self.trained: list[Gradient] = []
        self._laid_out: list[Gradient] = []  # those that `layout` is of
        self.layout = self.sum_layout = self.kept_as = GradientLayout((), ())
        self.state = State.EMPTY
        # what backward has brought, as long as it has not left the device
        self.gathered: dict[Gradient, Tensor] = {}
        self.missing = 0  # how many of the trained ones it has yet to bring
        self.is_watched = False  # whether somebody would see how one of these is added up
        # whether what the engine has of them stays on the device, for the unit's visit; there lie their norms, too
        self.is_on_device = False
        self.leaving_norms: Tensor | None = None
        # comes after everything that is on its way to them; None if nothing is known to be
        self.ticket: Ticket | None = None
        # the host memory that they stay in; None if there is none yet
        self.memory: GradientMemory | None = None
        self.expect()

    # ------------------------------------------------------------------------------------------------ their state

    def hold(self) -> None:
        """Note that backward brings gradients, or that sums have come."""
        assert self.state is not State.CONSUMED, self.unit.name
        self.state = State.HELD

    def consume(self) -> None:
        """Note that the unit is stepped with them, before `step()` is called."""
        assert self.state is State.HELD, self.unit.name
        self.state = State.CONSUMED

    def acknowledge_step(self, keeps_gradients: bool) -> None:
        """Note that `step()` was called, or never will be, for the step that has consumed them."""
        assert self.state is State.CONSUMED, self.unit.name
        self.state = State.HELD if keeps_gradients else State.EMPTY

    def note_dropped(self) -> None:
        """Note that some were dropped, which may be all that the engine has."""
        for gradient in self.gradients:
            if gradient.tensor is not None:
                return
        self.is_on_device = False
        if self.state is not State.CONSUMED:
            self.state = State.EMPTY

    # ------------------------------------------------------------------------------------- where they are, and how

    def expect(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        self.trained = [gradient for gradient in self.gradients if gradient.weight.master.requires_grad]
        self.missing = len(self.trained)

    def forget_gathered(self) -> None:
        """Forget what has not left the device."""
        self.gathered = {}
        self.is_watched = False

    def lay_out(self, tensors: Mapping[Gradient, Tensor]) -> GradientLayout:
        """Return how these are sent: as `layout` tells, unless some are missing, or came in another dtype."""
        dtypes = [gradient.weight.compute_dtype for gradient in self.trained]
        if self.trained != self._laid_out or dtypes != self.layout.dtypes:
            if self._laid_out:
                self.release_memory()
            self._laid_out = self.trained
            weights = [gradient.weight for gradient in self.trained]
            self.layout = self.sum_layout = self.kept_as = GradientLayout(weights, dtypes)
            of_sums = [weight.dtype for weight in weights]
            if dtypes != of_sums:
                self.sum_layout = GradientLayout(weights, of_sums)
        arriving = [tensor.dtype for tensor in tensors.values()]
        if arriving == dtypes:
            return self.layout
        return GradientLayout([gradient.weight for gradient in tensors], arriving)

    def own(self) -> GradientMemory:
        """Return the memory in which gradients stay, as `kept_as` tells."""
        if self.memory is None:
            buffer = self.segment.memory.get_beside("gradients", self.kept_as.nbytes, pin=False)
            if self.kept_as is self.layout or self.unit.visits:
                buffer.pin()  # the device writes it, or reads sums
            self.memory = GradientMemory(buffer.bytes)
        return self.memory

    def room_for(self, gradient: Gradient, dtype: torch.dtype) -> Tensor:
        """Return memory for the sum of one weight's gradients, or for the first of them, which came in this dtype.

        From the first sum on, gradients that arrive in lower dtypes than the masters' are kept in the masters'.
        """
        if gradient.is_seen:  # it becomes the user's
            return torch.empty_like(gradient.weight.host)
        index = self.trained.index(gradient)
        is_sum = gradient.tensor is not None or dtype != self.kept_as.dtypes[index]
        if is_sum and self.kept_as is not self.sum_layout:
            self.release_memory()  # what lies in it keeps it
            self.kept_as = self.sum_layout
        return self.own().views(self.kept_as)[0][index]

    def has_at_hand(self, tensor: Tensor) -> bool:
        """Tell whether a gradient lies where a visit would read it: on the device, or in memory of its own."""
        if self.is_on_device or self.memory is None:
            return self.is_on_device
        start = self.memory.bytes.data_ptr()
        return start <= tensor.data_ptr() < start + self.memory.bytes.nbytes

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

    def release_memory(self) -> None:
        """Let go of the memory; what lies in it keeps it."""
        self.wait()
        self.segment.memory.release_beside("gradients")
        self.memory = None
        self.kept_as = self.layout
