"""Which units visit for a step: those that are to, if all of what the step does with them is passes over memory."""

from __future__ import annotations

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
    """Makes the visits of units."""

    def __init__(self, window: Window, stream: GradientStream) -> None:
        self.pieces = Pieces(window.backend, window.stats)
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
            if of_segment is None:
                return None
            of_segments.append(of_segment)
            ticket = of_weights[0].of_segment.ticket
            if ticket is not None:
                after.append(ticket)
        if not of_segments:
            return None
        return Visit(self.pieces, unit, step, of_segments, after, self._window.copies_of([unit]))

    def _part_of_visit(
        self,
        of_weights: Sequence[Gradient],
        copies: Sequence[Tensor | None],
        step: Step,
        gradients: Mapping[Gradient, Used],
    ) -> OfSegment | None:
        """Return what a visit does with a segment; None unless all of it can be stepped by passes over its memory."""
        of_segment = of_weights[0].of_segment
        sums = None
        if not of_segment.is_on_device and of_segment.memory is not None:
            sums = of_segment.memory.bytes
        part = OfSegment(of_segment.segment, self._known, sums, [], [], [])
        in_groups: dict[int, OnePass] = {}
        for gradient, copy in zip(of_weights, copies, strict=True):
            weight = gradient.weight
            if gradient not in gradients or weight.host is not weight.home:
                return None
            tensor, state = gradients[gradient]
            number = step.plan.gradients[gradient]
            settings = step.settings[number]
            if number not in in_groups:
                in_groups[number] = OnePass(step.optimizer, settings)
            lacks_state = not state and makes_state(step.optimizer, settings)
            # others are the user's, or lie where they are to be read soon
            is_ours = tensor is gradient.tensor and of_segment.has_at_hand(tensor)
            is_readable = tensor.dtype in (weight.dtype, torch.bfloat16)
            if lacks_state or not is_ours or not is_readable or len(gradient.scaling.factors) > MOST_FACTORS:
                return None
            part.works.append(Work(weight.home, tensor, state, copy))
            part.scalings.append(gradient.scaling)
            part.numbers.append(number)
        if not all(one_pass.is_possible for one_pass in in_groups.values()):
            return None
        return part if _takes(part, in_groups) else None


def _takes(part: OfSegment, in_groups: Mapping[int, OnePass]) -> bool:
    """Tell whether passes can step a segment, wherever its gradients are; asked once for what lies where it did."""
    if part.is_known:
        return True
    for work, number in zip(part.works, part.numbers, strict=True):
        if not in_groups[number].takes(work._replace(gradient=work.weight)):
            return False
    return True
