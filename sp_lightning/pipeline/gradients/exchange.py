"""What a process has to agree on with others about gradients: nothing if it is alone.

The processes of a machine have an exchange of their own (processes/turns.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.routes import Shipment
from sp_lightning.pipeline.gradients.segment_gradients import NO_SCALING, Gradient, SegmentGradients
from sp_lightning.pipeline.lanes.lanes import Ticket


class Exchange:
    """Of a process that is alone; what others may have a part in."""

    # ------------------------------------------------------------------------------------- in a backward pass

    def begin_pass(self) -> None:
        """Begin a backward pass: it brings its first gradient."""

    def adds_up(self, shipment: Shipment) -> bool:
        """Tell whether gradients are a part of sums that other processes have, too.

        Raises:
            RuntimeError: They can be neither that nor this process's own.
        """
        return False

    def add(self, shipment: Shipment, is_over: bool, measures_norms: bool) -> None:
        """Add what is on its way to those sums; `is_over`: this pass brings no more of the unit."""

    def pass_on(self, of_segment: SegmentGradients, after: Sequence[Ticket]) -> bool:
        """Let others go on with a unit, which is to be stepped then; tell whether the step awaits them."""
        return False

    def end_pass(self, averages: bool, measures_norms: bool) -> None:
        """End a pass of all processes; the sums are complete with it if it `averages`."""

    def abandon_pass(self) -> None:
        """Have others not wait for this process's part of a pass that an exception has ended."""

    # ------------------------------------------------------------------- between one backward pass and the next

    @property
    def lacks_sums(self) -> bool:
        """Whether a weight is trained now that has no sum over processes, as it was frozen when units were arranged."""
        return False

    def show(self, gradient: Gradient) -> None:
        """Make what has landed of a gradient the master's `.grad`, which is the user's."""
        shown = self.take(gradient)
        if shown is not None:
            gradient.weight.master.grad = shown

    def show_all(self, gradients: Iterable[Gradient]) -> None:
        """Show gradients that somebody may look at while the engine cannot be asked."""
        for gradient in gradients:
            self.show(gradient)

    def take(self, gradient: Gradient) -> Tensor | None:
        """Return what has landed of a gradient, which the engine then has no longer; None if there is nothing."""
        if gradient.tensor is None:
            return None
        gradient.of_segment.wait()
        with torch.inference_mode(False), torch.no_grad():
            taken = torch.empty_like(gradient.weight.host).copy_(gradient.tensor)
            gradient.scaling.apply_(taken)
        self.drop([gradient])
        return taken

    def drop(self, gradients: Collection[Gradient]) -> None:
        """Drop what the engine has of these on the host."""
        for gradient in gradients:
            gradient.tensor = gradient.norm = None
            gradient.scaling = NO_SCALING
        for of_segment in {gradient.of_segment for gradient in gradients}:
            of_segment.note_dropped()
