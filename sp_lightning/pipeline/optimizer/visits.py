"""Units that visit the device to be stepped there: state goes up, is stepped, and comes down again, piece by piece.

    host, page-locked                       device, beside computing
    masters, state, sums of gradients ----> a piece                            state up
                                            the pass that the host would make  visit
    masters, state, copies            <---- the piece                          state down

Pieces (pieces.py) lie in few buffers, which take turns. Gradients that have stayed on the device (routes.py) are read
there. A visit begins as its unit is brought for the next forward: new weights are written to the unit's place, and
nothing is sent. In backward, and if somebody waits for the masters before, it begins without a place.

State lies together beside the masters, page-locked. What the optimizer, or a checkpoint, has put elsewhere moves there
at the unit's next visit, one unit after another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override

from sp_lightning.optim.compact import Work
from sp_lightning.optim.of_torch import MOST_FACTORS, OnePass
from sp_lightning.optim.on_device import step_range
from sp_lightning.optim.rules import Pass
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, Scaling
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.optimizer.kinds import makes_state
from sp_lightning.pipeline.optimizer.pieces import (
    PIECES_AT_ONCE,
    Piece,
    PieceBuffer,
    Route,
    addresses_of,
    fields_of,
    gather_state,
)
from sp_lightning.pipeline.optimizer.plan import Step, Used
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.window.window import Window


@dataclass(eq=False)
class _Copies:
    """A job for a lane: copies of a piece between host and device."""

    backend: Backend
    pairs: Sequence[tuple[Tensor, Tensor]]

    def __call__(self) -> None:
        for target, source in self.pairs:
            self.backend.copy(target, source)


@dataclass(eq=False)
class _PieceStep:
    """A job for a lane: a piece is stepped where it lies, and new weights are put where they are needed."""

    piece: Piece
    passes: Sequence[Pass]  # of all weights of its segment
    gradients: Sequence[Tensor]  # those that have stayed on the device; none if they come with the piece
    is_placed: bool

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            for (number, begin, end), memory in self.piece.ranges:
                whole = self.passes[number]
                size = whole.memory.weight.numel()
                if self.gradients:
                    flat = self.gradients[number].as_strided((size,), (1,))
                    memory = memory._replace(gradient=flat[begin:end])
                step_range(whole._replace(memory=memory), begin)
            if self.is_placed:
                for place, weights in self.piece.placed:
                    place.copy_(weights)


class OfSegment(NamedTuple):
    """What a step does with a segment that visits: the works of its weights, in their order."""

    segment: Segment
    sums: Tensor | None  # the host memory in which gradients lie; None if they have stayed on the device
    works: list[Work]
    scalings: list[Scaling]
    numbers: list[int]  # of the param groups


def _part_of_visit(
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
    part = OfSegment(of_segment.segment, sums, [], [], [])
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
        work = Work(weight.master.data, tensor, state, copy)
        lacks_state = not state and makes_state(step.optimizer, settings)
        # others are the user's, or lie where they are to be read soon
        is_ours = tensor is gradient.tensor and of_segment.has_at_hand(tensor)
        if lacks_state or not is_ours or not _passes_over(in_groups[number], work, gradient.scaling):
            return None
        part.works.append(work)
        part.scalings.append(gradient.scaling)
        part.numbers.append(number)
    return part


def _passes_over(one_pass: OnePass, work: Work, scaling: Scaling) -> bool:
    """Tell whether a step of a weight is a pass over its memory, wherever its gradient is."""
    weight, gradient = work.weight, work.gradient
    if gradient.dtype not in (weight.dtype, torch.bfloat16) or gradient.stride() != weight.stride():
        return False
    return len(scaling.factors) <= MOST_FACTORS and one_pass.takes(work._replace(gradient=weight))


class Visit(Ticket):
    """A step of a unit on the device; done when the host has the new masters and state.

    It begins when somebody has it begin, or waits for it.
    """

    def __init__(
        self,
        visits: Visits,
        unit: Unit,
        step: Step,
        of_segments: Sequence[OfSegment],
        after: Sequence[Ticket],
        copies: Sequence[Ticket],
    ) -> None:
        self._visits = visits
        self._unit = unit
        self._step = step
        self._of_segments = of_segments
        self.weights = {weight for of_segment in of_segments for weight in of_segment.segment.weights}
        self._after = after  # what brings gradients, or their scaling, to the host
        self._copies = copies  # to the device, which may still read masters
        self._is_placed = False
        self._ready: Ticket | None = None  # done when the new weights are in the unit's place
        self._gone: Ticket | None = None  # done when all has come down
        self._has_failed = False

    def begin_in_place(self) -> Ticket:
        """Begin it, and return the ticket of new weights in the unit's place."""
        backend = self._visits.backend
        for of_segment in self._of_segments:
            segment = of_segment.segment
            segment.lying = segment.epoch
            if backend.poison:
                backend.invalidate(segment.place)
        self._is_placed = True
        return self.begin()

    def begin(self) -> Ticket:
        """Begin it: a forward may have the new weights before the host has, so these count as changed from now on."""
        self._unit.visit = None
        with torch.inference_mode(False), without_torch_function():
            increment_version(weight.master for weight in self.weights)
            for of_segment in self._of_segments:
                of_segment.segment.note_stepped(has_values=False)
        backend = self._visits.backend
        self._earlier = [backend.computed(), *self._copies]
        if all(ticket.done for ticket in self._after):
            for ticket in self._after:
                ticket.join()  # raises what it failed with
            self._ready = self._ask()
        else:
            self._ready = backend.ask_later(self._ask, self._after)
        return self._ready

    @property
    @override
    def is_asked(self) -> bool:
        return self._gone is not None

    @override
    def asked(self) -> Ticket:
        """Return the ticket of what comes down; begin the visit if nobody has."""
        ready = self.begin() if self._ready is None else self._ready
        ready.asked()
        assert self._gone is not None
        return self._gone

    @override
    def join(self) -> None:
        self.asked().join()
        self._of_segments = ()  # with gradients on the device, which nothing reads any more

    @property
    @override
    def done(self) -> bool:
        return self._has_failed or (self._gone is not None and self._gone.done)

    def _ask(self) -> Ticket:
        """Ask the device for all pieces, and return a ticket for the new weights."""
        try:
            last: Sequence[Ticket] = ()
            with self._visits.asking:
                for of_segment in self._of_segments:
                    passes = self._passes_of(of_segment)
                    for piece in self._visits.pieces_of(of_segment, passes):
                        last = self._send(piece, of_segment, passes, last)
        except BaseException:
            self._has_failed = True
            raise
        ready, self._gone = last
        return ready

    def _passes_of(self, of_segment: OfSegment) -> list[Pass]:
        """Count the step, and return the passes over a segment, whose state lies together from now on."""
        gather_state(of_segment.segment, [work.state for work in of_segment.works])
        passes: dict[int, Pass] = {}
        for group in set(of_segment.numbers):
            chosen = [index for index, number in enumerate(of_segment.numbers) if number == group]
            works = []
            for index in chosen:
                work = of_segment.works[index]
                work = work._replace(scaling=of_segment.scalings[index].numbers(work.weight.dtype))
                if of_segment.sums is None:  # the gradient is on the device
                    work = work._replace(gradient=work.weight)
                works.append(work)
            one_pass = OnePass(self._step.optimizer, self._step.settings[group])
            passes.update(zip(chosen, one_pass.passes_of(works), strict=True))
        return [passes[index] for index in range(len(passes))]

    def _send(
        self, piece: Piece, of_segment: OfSegment, passes: Sequence[Pass], last: Sequence[Ticket]
    ) -> Sequence[Ticket]:
        """Ask for a piece after the last one; return when it is stepped, and when it has come down."""
        visits = self._visits
        name = self._unit.name
        trace = visits.backend.trace
        earlier = [*self._earlier, piece.buffer.ticket]
        up = trace.beside(Kind.STATE_UP, name, _Copies(visits.backend, piece.up), earlier, piece.bytes_up)
        gradients = [work.gradient for work in of_segment.works] if of_segment.sums is None else []
        step = _PieceStep(piece, passes, gradients, self._is_placed)
        moved = piece.bytes_up + piece.bytes_down
        ready = trace.beside(Kind.VISIT, name, step, [up, *last[:1]], moved)
        copies = _Copies(visits.backend, piece.down)
        gone = trace.beside(Kind.STATE_DOWN, name, copies, [ready, *last[1:]], piece.bytes_down)
        piece.buffer.ticket = gone
        visits.stats.bytes_to_device += piece.bytes_up
        visits.stats.bytes_to_host += piece.bytes_down
        return ready, gone


class Visits:
    """The routes of all units that visit, and the device memory for their pieces."""

    def __init__(self, window: Window, stream: GradientStream) -> None:
        self.backend = window.backend
        self.stats = window.stats
        self.asking = threading.Lock()  # one visit after the other takes pieces: two threads ask for visits
        self._window = window
        self._stream = stream
        self._routes: dict[Segment, Route] = {}
        self._buffers: list[PieceBuffer] = []

    def visit_of(self, unit: Unit, step: Step, gradients: Mapping[Gradient, Used]) -> Visit | None:
        """Return a visit of the unit that makes this step; None if it has to be made on the host."""
        of_segments: list[OfSegment] = []
        after: list[Ticket] = []
        for segment in unit.segments:
            of_weights = [self._stream.of[weight] for weight in segment.weights]
            if gradients.keys().isdisjoint(of_weights):
                continue
            of_segment = _part_of_visit(of_weights, segment.copies, step, gradients)
            if of_segment is None:
                return None
            of_segments.append(of_segment)
            ticket = of_weights[0].of_segment.ticket
            if ticket is not None:
                after.append(ticket)
        if not of_segments:
            return None
        return Visit(self, unit, step, of_segments, after, self._window.copies_of([unit]))

    def pieces_of(self, of_segment: OfSegment, passes: Sequence[Pass]) -> list[Piece]:
        """Return the pieces in which a segment visits."""
        segment = of_segment.segment
        memories = [step.memory for step in passes]
        if of_segment.sums is None:
            memories = [memory._replace(gradient=None) for memory in memories]
        route = self._routes.get(segment)
        if route is None or route.addresses != addresses_of(memories):
            state = segment.memory.beside["state"].bytes
            route = Route(segment, memories, fields_of(segment, state, of_segment.sums))
            self._routes[segment] = route
        if not self._buffers or self._buffers[0].bytes.nbytes < route.nbytes:
            self.close()
            allocated = [self.backend.allocate(route.nbytes) for _ in range(PIECES_AT_ONCE)]
            there = self.backend.computed()  # what has used the memory before comes first
            self._buffers = [PieceBuffer(memory, there) for memory in allocated]
        if not route.pieces:
            route.lie_in(self._take_turns())
        return route.pieces

    def _take_turns(self) -> Iterator[PieceBuffer]:
        while True:
            buffer = self._buffers.pop(0)
            self._buffers.append(buffer)
            yield buffer

    def nbytes(self) -> int:
        """Return the bytes of device memory for pieces."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the memory for pieces, when nothing is in it any more."""
        for buffer in self._buffers:
            buffer.ticket.join()
        self._buffers.clear()
        for route in self._routes.values():
            route.pieces = []
