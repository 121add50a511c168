"""The gradients of one segment: the state that they are in, and the host memory that they stay in until asked for.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Whoever reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.

[Note: where gradients are on the host]
In one of two buffers beside the masters, each made when first needed: `arrived`, which the device writes, has them as
they came; `sums` has what was added up, in the masters' dtypes. If they come in these, one buffer is both. Else sums
take the place of what arrived, and from then on also the first gradients of a step go there, through landing memory.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.segment import GradientLayout, Segment
from sp_lightning.pipeline.weights.weight import Leftover, Weight, used_in_backward, used_in_step


class Gradient:
    """The gradient of one weight."""

    __slots__ = ("expected_dtype", "factors", "is_sum", "is_used", "norm", "of_segment", "tensor", "weight")

    def __init__(self, weight: Weight, of_segment: SegmentGradients) -> None:
        self.weight = weight
        self.of_segment = of_segment
        # in which it comes, unless a step shows another use of the weight; the same in all processes
        self.expected_dtype = weight.compute_dtype
        # what the engine has: as it came, or a sum in the master's dtype. On the host it may not have landed yet.
        self.tensor: Tensor | None = None
        self.norm: Tensor | None = None  # the norm of that, on the host; None if it is not known
        # what it is still to be multiplied by, one after the other: the inverse of a loss scale, a clipping factor
        self.factors: tuple[Tensor, ...] = ()
        self.is_used = False  # whether an optimizer's step has used what the engine has
        self.is_sum = False  # whether it was added up on the device, in memory of its own

    @property
    def is_seen(self) -> bool:
        """Whether somebody would see how it is added up: it has a `.grad` of the user's, or hooks to call."""
        master = self.weight.master
        if master._backward_hooks or master._post_accumulate_grad_hooks:
            return True
        return master.grad is not None

    def set_tensor(self, tensor: Tensor, norm: Tensor | None = None, is_sum: bool = False) -> None:
        """Note where the engine has it, or will have it, and where its norm."""
        self.tensor = tensor
        self.norm = norm
        self.is_sum = is_sum
        self.is_used = False
        if self.weight.leftover is Leftover.ZEROS:  # they add nothing
            self.weight.leftover = Leftover.NOTHING

    def fill_zeros(self) -> None:
        """Have the zeros that plain training has (`Leftover.ZEROS`), to which nothing has come."""
        # a GPU-side update reads all gradients in one place
        device = self.weight.twin.data.device if self.of_segment.is_on_device else "cpu"
        zeros = torch.zeros_like(self.weight.host, device=device)
        self.set_tensor(zeros, zeros.new_zeros(()))

    def check_readable(self) -> None:
        """Raise if it is to be read or changed, and was used already."""
        if self.of_segment.is_consumed:
            raise used_in_backward(self.weight.name)
        if self.weight.leftover is Leftover.USED:
            raise used_in_step(self.weight.name, "it is to be read, or clipped")

    def scale(self, factor: Tensor) -> None:
        """Have it multiplied as it is read, bit for bit as `GradScaler.unscale_` and `clip_grad_norm_` do."""
        self.factors = (*self.factors, factor)

    def show(self) -> None:
        """Make what has landed of it the master's `.grad`, which is the user's."""
        if self.weight.leftover is Leftover.ZEROS:
            self.fill_zeros()
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
            for factor in self.factors:
                taken.mul_(factor)
        drop([self])
        return taken


def drop(gradients: Collection[Gradient]) -> None:
    """Drop what the engine has of these."""
    for gradient in gradients:
        gradient.tensor = gradient.norm = None
        gradient.factors = ()
    for of_segment in {gradient.of_segment for gradient in gradients}:
        if not of_segment.stored_gradients:
            of_segment.is_on_device = False


class StepInBackward(Protocol):
    """A step of an optimizer that uses gradients as they arrive (optimizer/early_step.py)."""

    keeps_gradients: bool

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether it uses gradients that are complete."""

    def step_with(self, of_segment: SegmentGradients) -> None:
        """Use them."""


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


class LandingBuffer(GradientMemory):
    """Memory on the host, through which gradients of one unit after the other pass.

    Attributes:
        users: How many have reserved it, or have gradients in it, or on their way into it.
        turn: When it was reserved last.
        last_reader: The job that reads it last, as far as it is known.
    """

    def __init__(self, host: HostBuffer, released: threading.Condition) -> None:
        super().__init__(host.bytes)
        self.host = host
        self.users = 0
        self.turn = 0
        self.last_reader: Ticket | None = None
        self._released = released

    def release(self) -> None:
        """Free it for the next user, as its gradients have been read."""
        with self._released:
            self.users = max(0, self.users - 1)
            self._released.notify_all()


class SegmentGradients:
    """The gradients of what of a unit is sent together: of its trained weights, or of others that may be trained yet.

    Attributes:
        segment: These weights, and the memory that their masters lie in; gradients lie beside it.
        is_consumed: Whether an optimizer has stepped the unit with them in backward; its `step()` is yet to be called.
        layout: How those that come lie in memory.
        sum_layout: How sums lie in memory, in the masters' dtypes.
        arrived: The memory in which they stay as they came; None if there is none.
        sums: The memory for sums; None if there is none. See [Note: where gradients are on the host].
        landing: The buffer that they lie in until the optimizer has read them; None if it is not one of few.
    """

    def __init__(self, unit: Unit, segment: Segment) -> None:
        self.unit = unit
        self.segment = segment
        self.gradients = [Gradient(weight, self) for weight in segment.weights]
        # those of weights that require one, in this backward pass
        self.trained: list[Gradient] = []
        self._laid_out: list[Gradient] = []  # those that the layouts are of
        self.layout = self.sum_layout = GradientLayout((), ())
        self.is_consumed = False
        # what backward has brought, as long as it has not left the device
        self.gathered: dict[Gradient, Tensor] = {}
        self.missing = 0  # how many of the trained ones it has yet to bring
        # whether nothing more may come of the weight that has brought one last
        self.is_last = False
        self.is_on_device = False  # whether what the engine has stays there until the unit is updated
        self.ticket: Ticket | None = None  # comes after everything that is known to be on its way
        self.arrived: GradientMemory | None = None
        self.sums: GradientMemory | None = None
        self.landing: LandingBuffer | None = None
        self.expect()

    # ------------------------------------------------------------------------------------------- what the engine has

    def consume(self) -> None:
        """Note that the unit is stepped with them, before `step()` is called."""
        assert self.stored_gradients, self.unit.name
        self.is_consumed = self.unit.is_used_up = True

    def acknowledge_step(self) -> None:
        """Note that `step()` was called, or never will be, for the step that has consumed them."""
        assert self.is_consumed, self.unit.name
        self.is_consumed = self.unit.is_used_up = False

    def mark_on_device(self) -> None:
        """Note that what the engine has of them stays on the device."""
        self.is_on_device = True

    def mark_on_host(self) -> None:
        """Note that what the engine has of them is on the host now."""
        self.is_on_device = False

    @property
    def stored_gradients(self) -> list[Gradient]:
        """Those that the engine has, beside what is gathered."""
        return [gradient for gradient in self.gradients if gradient.tensor is not None]

    def show(self) -> None:
        """Make what the engine has of them the masters' `.grad`."""
        for gradient in self.gradients:
            gradient.show()

    # -------------------------------------------------------------------------------------------- as they are gathered

    def expect(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        self.trained = [each for each in self.gradients if each.weight.master.requires_grad]
        self.missing = len(self.trained)

    def gather(self, gradient: Gradient, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others, on the device."""
        assert not self.is_consumed, self.unit.name
        if not self.gathered:
            self.expect()
        self.missing -= gradient not in self.gathered
        self.gathered[gradient] = tensor
        self.is_last = is_last

    def take_gathered(self) -> dict[Gradient, Tensor]:
        """Return what was gathered, to be sent."""
        gathered = self.gathered
        self.gathered = {}
        return gathered

    def gather_again(self, gathered: dict[Gradient, Tensor]) -> None:
        """Have what was taken sent another way."""
        self.gathered = gathered

    def lay_out(self) -> None:
        """Have layouts for what was gathered, in the dtypes in which it came."""
        came = self.gathered
        dtypes = [came[each].dtype if each in came else each.weight.compute_dtype for each in self.trained]
        if self.trained == self._laid_out and dtypes == self.layout.dtypes:
            return
        self.release_memory()
        self._laid_out = self.trained
        weights = [gradient.weight for gradient in self.trained]
        self.layout = self.sum_layout = GradientLayout(weights, dtypes)
        of_sums = [weight.dtype for weight in weights]
        if of_sums != dtypes:
            self.sum_layout = GradientLayout(weights, of_sums)

    # ----------------------------------------------------------------------------------------------- where they stay

    @property
    def memory(self) -> GradientMemory | None:
        """The memory in which they stay, whatever is in it; None if there is none."""
        return self.sums or self.arrived

    def make_arrived(self) -> GradientMemory:
        """Return the memory in which they stay as they came."""
        if self.arrived is None:
            self.arrived = self._make_memory(self.layout, pin=True)
        return self.arrived

    def make_sums(self) -> dict[Gradient, Tensor]:
        """Return the place of each sum."""
        if self.sum_layout.dtypes == self.layout.dtypes:
            memory = self.make_arrived()
        else:
            if self.sums is None:
                self.release_memory()  # what lies in it keeps it
                # the device writes no sums, but reads them if the unit visits
                self.sums = self._make_memory(self.sum_layout, pin=self.unit.updates_on_device)
            memory = self.sums
        return dict(zip(self.trained, memory.views(self.sum_layout)[0], strict=True))

    def _make_memory(self, layout: GradientLayout, pin: bool) -> GradientMemory:
        buffer = self.segment.memory.get_companion("gradients", layout.nbytes, pin=False)
        if pin:
            buffer.pin()
        return GradientMemory(buffer.bytes)

    def release_memory(self) -> None:
        """Let go of the memory; what lies in it keeps it."""
        self.wait()
        self.segment.memory.release_companion("gradients")
        self.forget_memory()

    def forget_memory(self) -> None:
        """Forget the memory, which lies beside the masters."""
        self.arrived = self.sums = None

    def has_at_hand(self, tensor: Tensor) -> bool:
        """Tell whether a gradient lies where a visit would read it: on the device, or in memory of its own."""
        memory = self.memory
        if self.is_on_device or memory is None:
            return self.is_on_device
        start = memory.bytes.data_ptr()
        return start <= tensor.data_ptr() < start + memory.bytes.nbytes

    def land_in(self, buffer: LandingBuffer) -> None:
        """Note the buffer of few that they lie in until somebody has read them."""
        self.landing = buffer

    def pass_landing(self) -> LandingBuffer | None:
        """Return the buffer of few that they lie in, to whoever releases it; None if there is none."""
        landing = self.landing
        self.landing = None
        return landing

    # --------------------------------------------------------------------------------------------- what is on its way

    def record_download(self, memory: GradientMemory, gathered: Collection[Gradient], has_norms: bool) -> None:
        """Note in which memory those lie that were gathered, as they came, and maybe their norms."""
        tensors, norms = memory.views(self.layout)
        for index, gradient in enumerate(self.trained):
            if gradient in gathered:
                gradient.set_tensor(tensors[index], norms[index] if has_norms else None)

    def set_ticket(self, ticket: Ticket) -> None:
        """Have whoever waits for them wait for this ticket, which comes after all that is on its way."""
        self.ticket = ticket

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

    def abandon(self) -> None:
        """After an exception in backward: forget what has not left the device, and what a step in it was to read."""
        self.gathered = {}
        is_lost = self.pass_landing() is not None
        try:
            self.wait()
        except Exception:  # it was raised already, or is due to the exception
            is_lost = True
        if is_lost:
            drop(self.gradients)
