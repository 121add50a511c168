"""Which units visit for a step: those that are to, if all of what the step does with them is passes over memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.optim.of_torch import MOST_FACTORS, OnePass
from sp_lightning.optim.passes import Work
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.optimizer.kinds import makes_state
from sp_lightning.pipeline.optimizer.pieces import Pieces
from sp_lightning.pipeline.optimizer.plan import Step, Used
from sp_lightning.pipeline.optimizer.visit import OfSegment, Visit
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.window.window import Window


class Visits:
    """Makes the visits of units.

    Attributes:
        why_not: Why a unit that is to visit was stepped on the host in this step; empty if there is nothing to say.
    """

    def __init__(self, window: Window, stream: GradientStream) -> None:
        self.pieces = Pieces(window.backend, window.stats)
        self.why_not = ""
        self._window = window
        self._stream = stream
        self._known: dict[Segment, list[object]] = {}  # what was tried, and lies together with its state

    def visit_of(self, unit: Unit, step: Step, gradients: Mapping[Gradient, Used]) -> Visit | None:
        """Return a visit of the unit that makes this step; None if it has to be made on the host."""
        of_segments: list[OfSegment] = []
        after: list[Ticket] = []
        for segment in unit.segments:
            of_weights = [self._stream.of[weight] for weight in segment.weights]
            if gradients.keys().isdisjoint(of_weights):
                continue
            of_segment = self._part_of_visit(of_weights, segment.copies, step, gradients)
            if isinstance(of_segment, str):
                self.why_not = of_segment
                return None
            of_segments.append(of_segment)
            ticket = of_weights[0].of_segment.ticket
            if ticket is not None:
                after.append(ticket)
        if not of_segments:
            return None
        return Visit(self.pieces, unit, step, of_segments, after, self._window.copies_of([unit]))

    def end_step(self) -> None:
        """Warn, when an optimizer has stepped, if units were to visit, and none ever has."""
        if self.why_not and not self._window.stats.visits:
            warnings.warn(
                "Units were to visit the device, to be stepped there, and the host has stepped "
                f"them, which takes longer: {self.why_not}.",
                stacklevel=2,
            )
        self.why_not = ""

    def _part_of_visit(
        self,
        of_weights: Sequence[Gradient],
        copies: Sequence[Tensor | None],
        step: Step,
        gradients: Mapping[Gradient, Used],
    ) -> OfSegment | str:
        """Return what a visit does with a segment, or why passes over its memory cannot make the step."""
        of_segment = of_weights[0].of_segment
        sums = None
        if not of_segment.is_on_device and of_segment.memory is not None:
            sums = of_segment.memory.bytes
        part = OfSegment(of_segment.segment, self._known, sums, [], [], [])
        in_groups: dict[int, OnePass] = {}
        for gradient, copy in zip(of_weights, copies, strict=True):
            weight = gradient.weight
            if gradient not in gradients:
                return f"{weight.name!r} has no gradient"
            if weight.host is not weight.home:
                return f"{weight.name!r} was given other memory"
            tensor, state = gradients[gradient]
            number = step.plan.gradients[gradient]
            settings = step.settings[number]
            if number not in in_groups:
                in_groups[number] = OnePass(step.optimizer, settings)
            if not state and makes_state(step.optimizer, settings):
                return ""  # the host makes it, once
            # others are the user's, or lie where they are to be read soon
            if tensor is not gradient.tensor or not of_segment.has_at_hand(tensor):
                return f"the gradient of {weight.name!r} was read, set or kept"
            is_readable = weight.dtype in (tensor.dtype, torch.float32)
            if not is_readable or len(gradient.scaling.factors) > MOST_FACTORS:
                return f"the gradient of {weight.name!r} is {tensor.dtype}, or scaled too often"
            part.works.append(Work(weight.home, tensor, state, copy))
            part.scalings.append(gradient.scaling)
            part.numbers.append(number)
        is_possible = all(one_pass.is_possible for one_pass in in_groups.values())
        # asked once for what lies where it did; the device casts gradients and copies of any dtype
        if is_possible and (
            part.is_known
            or all(
                in_groups[number].takes(work._replace(gradient=work.weight, copy=None))
                for work, number in zip(part.works, part.numbers, strict=True)
            )
        ):
            return part
        return f"{type(step.optimizer).__name__} does not step all of their weights in one pass"
