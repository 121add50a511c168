"""The gradients of one segment, and the state that they are in; the host memory for them is in gradient_memory.py.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Code that reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_memory import GradientMemory, LandingBuffer, MemoryBesideMasters
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import GradientLayout, Segment
from sp_lightning.pipeline.weights.weight import GradientLife, Weight, used_in_backward, used_in_step


class Gradient:
    """The gradient of one weight."""

    __slots__ = (
        "expected_dtype", "factors", "is_on_device", "is_sum", "norm", "of_segment", "tensor", "weight",
    )  # fmt: skip

    def __init__(self, weight: Weight, of_segment: SegmentGradients) -> None:
        self.weight = weight
        self.of_segment = of_segment
        # Its gradient comes in this dtype, unless a step shows another use of the weight. All processes agree on it.
        self.expected_dtype = weight.compute_dtype
        # The engine's gradient, as it came, or a sum in the master's dtype. On the host it may not have landed yet.
        self.tensor: Tensor | None = None
        # The norm of `tensor`, on the host; None if it is not known.
        self.norm: Tensor | None = None
        # An update multiplies the gradient by each of these: the inverse of a loss scale, a clipping factor.
        self.factors: tuple[Tensor, ...] = ()
        self.is_on_device = False  # whether `tensor` stays on the device until the unit is updated
        self.is_sum = False  # whether `tensor` was added up on the device, in memory of its own

    @property
    def accumulates_in_grad(self) -> bool:
        """Whether users see how it is added up: the master has a `.grad` of theirs, or hooks."""
        master = self.weight.master
        if master._backward_hooks or master._post_accumulate_grad_hooks:
            return True
        return master.grad is not None

    def set_tensor(
        self,
        tensor: Tensor,
        norm: Tensor | None = None,
        is_on_device: bool = False,
        is_sum: bool = False,
    ) -> None:
        """Set the tensor that has the gradient, or will have it when it has landed, and its norm."""
        self.tensor = tensor
        self.norm = norm
        self.is_on_device = is_on_device
        self.is_sum = is_sum
        if self.weight.gradient_life is not GradientLife.SPENT:
            self.weight.gradient_life = GradientLife.OURS

    def check_readable(self) -> None:
        """Raise if the gradient cannot be read or changed, because a step has used it, and it was dropped."""
        if self.of_segment.is_consumed:
            raise used_in_backward(self.weight.name)
        if self.weight.gradient_life is GradientLife.SPENT:
            raise used_in_step(self.weight.name, "it is to be read, or clipped")

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient when it is read, bit for bit as `GradScaler.unscale_` and `clip_grad_norm_` do."""
        self.factors = (*self.factors, factor)

    def show(self) -> None:
        """Make the gradient the master's `.grad`, which is the user's."""
        shown = self.take()
        if shown is not None:
            self.weight.master.grad = shown

    def take(self) -> Tensor | None:
        """Return the gradient, which the engine then drops; None if there is none."""
        if self.tensor is None:
            return None
        self.of_segment.wait()
        with untracked():
            taken = torch.empty_like(self.weight.current_memory).copy_(self.tensor)
            for factor in self.factors:
                taken.mul_(factor)
        self.drop()
        return taken

    def drop(self) -> None:
        """Drop the engine's tensor, if there is one."""
        self.tensor = self.norm = None
        self.factors = ()
        if self.weight.gradient_life is not GradientLife.SPENT:
            self.weight.gradient_life = GradientLife.NONE

    def zero(self, to_none: bool) -> None:
        """Do what `zero_grad` does with the gradient: make it None, or zeros."""
        if self.of_segment.is_consumed:
            raise used_in_backward(self.weight.name)
        self.drop()
        self.weight.gradient_life = GradientLife.NONE
        if not to_none:
            # A GPU-side update reads all gradients in one place.
            is_on_device = self.of_segment.stored is Stored.ON_DEVICE
            device = self.weight.twin.data.device if is_on_device else "cpu"
            zeros = torch.zeros_like(self.weight.current_memory, device=device)
            self.set_tensor(zeros, zeros.new_zeros(()), is_on_device)


class Stored(enum.Enum):
    """The place where the engine has the gradients of a segment.

    A segment's gradients are all in one place:

        NOWHERE ----> ON_HOST ------------> NOWHERE    a step has used them, or they were shown or zeroed
              '-----> ON_DEVICE ----------> NOWHERE
                          '---> ON_HOST                the device had no memory for a sum
    """

    NOWHERE = enum.auto()
    ON_HOST = enum.auto()
    """They are in host memory, or on their way to it."""
    ON_DEVICE = enum.auto()
    """They stay on the device until their unit is updated."""


class StepInBackward(Protocol):
    """A step of an optimizer that uses gradients as they arrive (optimizer/clipping.py)."""

    keeps_gradients: bool

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether the step uses these complete gradients in backward."""

    def step_with(self, of_segment: SegmentGradients) -> None:
        """Step the unit with these gradients."""


class SegmentGradients:
    """The gradients of one segment of a unit: of its trained weights, or of frozen ones that may be trained later.

    Attributes:
        segment: The weights, and the memory of their masters. Gradients on the host lie next to it.
        is_consumed: Whether an optimizer has stepped the unit in backward. Its `step()` was not called yet.
        layout: The layout of gradients in memory, in the dtypes in which they come.
        sum_layout: The layout of sums in memory, in the masters' dtypes.
        memory_beside_masters: The host memory for gradients, next to the masters.
        landing: The landing buffer with the gradients, until the optimizer has read them; None if there is none.
        norms_on_device: The device memory for norms of gradients that stay there; None if none were measured.
    """

    def __init__(self, unit: Unit, segment: Segment) -> None:
        self.unit = unit
        self.segment = segment
        self.gradients = [Gradient(weight, self) for weight in segment.weights]
        # The gradients of weights that require one, in this backward pass.
        self.trained: list[Gradient] = []
        self._laid_out: list[Gradient] = []  # `trained` when the layouts were made
        self.layout = self.sum_layout = GradientLayout((), ())
        self.is_consumed = False
        # The gradients that backward has brought, and that have not been sent yet.
        self.gathered: dict[Gradient, Tensor] = {}
        # The number of trained weights whose gradients have not come in this backward pass.
        self.missing = 0
        # Whether the gradient that came last is its weight's last one in this backward pass.
        self.is_last = False
        # It comes after every copy and addition under way, and others wait for it.
        self.ticket: Ticket | None = None
        self.memory_beside_masters = MemoryBesideMasters(segment.memory)
        self.landing: LandingBuffer | None = None
        self.norms_on_device: GradientMemory | None = None

    # ------------------------------------------------------------------------------------------- what the engine has

    def consume(self) -> None:
        """Note that the unit is stepped with these gradients, before `step()` is called."""
        assert self.stored is not Stored.NOWHERE, self.unit.name
        assert not self.is_consumed, self.unit.name
        self.is_consumed = self.unit.update.is_stepped_in_backward = True

    def acknowledge_step(self) -> None:
        """Note that `step()` was called for the step in backward, or never will be."""
        assert self.is_consumed, self.unit.name
        self.is_consumed = self.unit.update.is_stepped_in_backward = False

    @property
    def stored(self) -> Stored:
        """The place of the gradients that the engine has, apart from those that are gathered."""
        for gradient in self.gradients:
            if gradient.tensor is not None:
                return Stored.ON_DEVICE if gradient.is_on_device else Stored.ON_HOST
        return Stored.NOWHERE

    @property
    def stored_tensors(self) -> dict[Gradient, Tensor]:
        """The gradients that the engine has, apart from those that are gathered."""
        return {gradient: gradient.tensor for gradient in self.gradients if gradient.tensor is not None}

    def show(self) -> None:
        """Make the gradients the masters' `.grad`."""
        for gradient in self.gradients:
            gradient.show()

    # -------------------------------------------------------------------------------------------- as they are gathered

    def expect(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        self.trained = [gradient for gradient in self.gradients if gradient.weight.master.requires_grad]
        self.missing = len(self.trained)

    def gather(self, gradient: Gradient, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others of its segment, on the device."""
        assert not self.is_consumed, self.unit.name
        if not self.gathered:
            self.expect()
        if gradient not in self.gathered:
            self.missing -= 1
        self.gathered[gradient] = tensor
        self.is_last = is_last

    def take_gathered(self) -> dict[Gradient, Tensor]:
        """Return the gradients that were gathered, to be sent."""
        gathered = self.gathered
        self.gathered = {}
        return gathered

    def lay_out(self) -> None:
        """Make layouts for the gradients that were gathered, in the dtypes in which they came."""
        gathered = self.gathered
        dtypes = [
            gathered[gradient].dtype if gradient in gathered else gradient.weight.compute_dtype
            for gradient in self.trained
        ]
        if self.trained == self._laid_out and dtypes == self.layout.dtypes:
            return
        self.release_memory()
        self._laid_out = self.trained
        weights = [gradient.weight for gradient in self.trained]
        self.layout = self.sum_layout = GradientLayout(weights, dtypes)
        sum_dtypes = [weight.dtype for weight in weights]
        if sum_dtypes != dtypes:
            self.sum_layout = GradientLayout(weights, sum_dtypes)

    # ----------------------------------------------------------------------------------------------- where they stay

    def make_sums(self) -> dict[Gradient, Tensor]:
        """Return the place of each sum."""
        differ = self.sum_layout is not self.layout
        if differ and not self.memory_beside_masters.has_sums:
            self.release_memory()  # gradients in it keep it alive
        # The device writes no sums of other dtypes. It reads them if the unit is updated there.
        pin = not differ or self.unit.update.is_on_device
        memory = self.memory_beside_masters.get(self.sum_layout, pin, has_sums=differ)
        return dict(zip(self.trained, memory.views(self.sum_layout)[0], strict=True))

    def release_memory(self) -> None:
        """Release the memory next to the masters; gradients in it keep it alive."""
        self.wait()
        self.memory_beside_masters.release()

    def pass_landing(self) -> LandingBuffer | None:
        """Return the landing buffer, which the caller releases; None if there is none."""
        landing = self.landing
        self.landing = None
        return landing

    # --------------------------------------------------------------------------------------------- what is on its way

    def wait(self) -> None:
        """Block until no copy and no addition is under way, not even for gradients that were dropped.

        Raises:
            Exception: The error that a copy or an addition raised.
        """
        ticket = self.ticket
        if ticket is None:
            return
        try:
            ticket.join()
        finally:
            if ticket.done:  # an interrupt may have ended the wait
                self.ticket = None

    def forget(self) -> None:
        """Forget the gradients, in whichever state they are."""
        for gradient in self.gradients:
            gradient.drop()
        self.gathered = {}
        self.ticket = self.landing = None

    def abandon(self) -> None:
        """After an exception in backward, forget gradients that were not sent, or that a step in it was to read."""
        self.gathered = {}
        is_lost = self.pass_landing() is not None
        try:
            self.wait()
        except Exception:  # this error was raised already, or is due to the exception in backward
            is_lost = True
        if is_lost:
            for gradient in self.gradients:
                gradient.drop()
