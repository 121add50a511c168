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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override

from sp_lightning.optim.of_torch import OnePass
from sp_lightning.optim.passes import Work, run
from sp_lightning.optim.rules import Pass
from sp_lightning.pipeline.gradients.segment_gradients import Scaling
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.optimizer.pieces import Piece, Pieces, are_same, gather_state
from sp_lightning.pipeline.optimizer.plan import Step
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import Weight


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
            steps: list[Pass] = []
            for (number, begin, end), memory in self.piece.ranges:
                whole = self.passes[number]
                size = whole.memory.weight.numel()
                if self.gradients:
                    flat = self.gradients[number].as_strided((size,), (1,))
                    memory = memory._replace(gradient=flat[begin:end])
                steps.append(whole._replace(memory=memory, begin=begin))
            run(steps)
            if self.is_placed:
                for place, weights in self.piece.placed:
                    place.copy_(weights)


class OfSegment(NamedTuple):
    """What a step does with a segment that visits: the works of its weights, in their order."""

    segment: Segment
    known: dict[Segment, list[object]]  # what of segments was tried, and lies together with its state
    sums: Tensor | None  # the host memory in which gradients lie; None if they have stayed on the device
    works: list[Work]
    scalings: list[Scaling]
    numbers: list[int]  # of the param groups

    @property
    def is_known(self) -> bool:
        """Whether all lies where it lay."""
        return are_same(self._lying(), self.known.get(self.segment))

    def gather_state(self) -> None:
        """Have the state of its weights lie together from now on, if it does not."""
        if not self.is_known:
            gather_state(self.segment, [work.state for work in self.works])
            self.known[self.segment] = self._lying()

    def _lying(self) -> list[object]:
        """Return all that is there from step to step: masters, copies, and what state consists of."""
        found: list[object] = []
        for work in self.works:
            found += (work.weight, work.copy, *work.state.values())
        return found


def note_stepped(segments: Iterable[Segment], weights: Iterable[Weight]) -> None:
    """Note that masters have changed by a step."""
    with torch.inference_mode(False), without_torch_function():
        increment_version(weight.master for weight in weights)
        for segment in segments:
            segment.note_stepped()


class Visit(Ticket):
    """A step of a unit on the device; done when the host has the new masters and state.

    It begins when somebody has it begin, or waits for it.
    """

    def __init__(
        self,
        pieces: Pieces,
        unit: Unit,
        step: Step,
        of_segments: Sequence[OfSegment],
        after: Sequence[Ticket],
        copies: Sequence[Ticket],
    ) -> None:
        self._pieces = pieces
        self._unit = unit
        self._step = step
        self.held: Sequence[OfSegment] = of_segments  # with gradients that have stayed
        self.weights = {weight for of_segment in of_segments for weight in of_segment.segment.weights}
        self._after = after  # what brings gradients, or their scaling, to the host
        self._copies = copies  # to the device, which may still read masters
        self._is_placed = False
        self._ready: Ticket | None = None  # done when the new weights are in the unit's place
        self._gone: Ticket | None = None  # done when all has come down
        self._error: BaseException | None = None  # of asking the device, which is not done twice

    def begin_in_place(self) -> Ticket:
        """Begin it, and return the ticket of new weights in the unit's place."""
        backend = self._pieces.backend
        for of_segment in self.held:
            segment = of_segment.segment
            segment.lying = segment.epoch
            if backend.poison:
                backend.invalidate(segment.place)
        self._is_placed = True
        return self.begin()

    def begin(self) -> Ticket:
        """Begin it: a forward may have the new weights before the host has, so these count as changed from now on."""
        self._unit.visit = None
        note_stepped([of_segment.segment for of_segment in self.held], self.weights)
        backend = self._pieces.backend
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
        if self._error is not None:
            raise self._error
        ready = self.begin() if self._ready is None else self._ready
        ready.asked()
        assert self._gone is not None
        return self._gone

    @override
    def join(self) -> None:
        self.asked().join()
        self.held = ()

    @property
    @override
    def done(self) -> bool:
        return self._error is not None or (self._gone is not None and self._gone.done)

    def _ask(self) -> Ticket:
        """Ask the device for all pieces, and return a ticket for the new weights."""
        try:
            last: Sequence[Ticket] = ()
            # or what a forward of an evaluation begins could not be used in training
            with torch.inference_mode(False), self._pieces.asking:
                for of_segment in self.held:
                    passes = self._passes_of(of_segment)
                    for piece in self._pieces.of(of_segment.segment, of_segment.sums, passes):
                        last = self._send(piece, of_segment, passes, last)
        except BaseException as error:
            self._error = error
            raise
        ready, self._gone = last
        return ready

    def _passes_of(self, of_segment: OfSegment) -> list[Pass]:
        """Count the step, and return the passes over a segment, whose state lies together from now on."""
        of_segment.gather_state()
        passes: dict[int, Pass] = {}
        for group in set(of_segment.numbers):
            chosen = [index for index, number in enumerate(of_segment.numbers) if number == group]
            works = []
            for index in chosen:
                work = of_segment.works[index]
                # in place of one that is on the device
                gradient = work.weight if of_segment.sums is None else work.gradient
                scaling = of_segment.scalings[index].numbers(work.weight.dtype)
                works.append(work._replace(gradient=gradient, scaling=scaling))
            one_pass = OnePass(self._step.optimizer, self._step.settings[group])
            passes.update(zip(chosen, one_pass.passes_of(works), strict=True))
        return [passes[index] for index in range(len(passes))]

    def _send(
        self, piece: Piece, of_segment: OfSegment, passes: Sequence[Pass], last: Sequence[Ticket]
    ) -> Sequence[Ticket]:
        """Ask for a piece after the last one; return when it is stepped, and when it has come down."""
        backend, name = self._pieces.backend, self._unit.name
        trace = backend.trace
        earlier = [*self._earlier, piece.buffer.ticket]
        up = trace.beside(Kind.STATE_UP, name, _Copies(backend, piece.up), earlier, piece.bytes_up)
        gradients = [work.gradient for work in of_segment.works] if of_segment.sums is None else []
        step = _PieceStep(piece, passes, gradients, self._is_placed)
        moved = piece.bytes_up + piece.bytes_down
        ready = trace.beside(Kind.VISIT, name, step, [up, *last[:1]], moved)
        copies = _Copies(backend, piece.down)
        gone = trace.beside(Kind.STATE_DOWN, name, copies, [ready, *last[1:]], piece.bytes_down)
        piece.buffer.ticket = gone
        self._pieces.stats.bytes_to_device += piece.bytes_up
        self._pieces.stats.bytes_to_host += piece.bytes_down
        return ready, gone
