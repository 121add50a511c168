"""Units that visit the device to be updated there: state goes up, is updated, and comes down again, piece by piece.

    host, pinned                            device, beside computing
    masters, state, sums of gradients ----> a piece                            state up
                                            the pass that the host would make  visit
    masters, state, copies            <---- the piece                          state down

A *piece* is the same slice of each field of the segment's weights: of masters, copies, gradients and all of their
state. Each field of neighboring weights lies together on the host, so a slice travels in one copy. Pieces lie in few
buffers, which take turns. Gradients that have stayed on the device (routes.py) are read there. A visit begins as its
unit is brought for the next forward: the new weights go to the unit's place, and no copy is sent. If other code waits
for the masters before, the visit begins without a place. In backward it does so, too, unless the plan defers visits:
then gradients stay longer, and fewer weights are sent.

If something keeps a unit from a visit, the host makes the step. The pieces of a segment are found once, and again if
some of its memory has moved.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim.layout import BLOCK, flat
from sp_lightning.optim.of_torch import MOST_FACTORS, OnePass, scaling_of
from sp_lightning.optim.on_device import PIECE, Effort, part_of
from sp_lightning.optim.passes import Work, run, taken
from sp_lightning.optim.rules import Memory, Pass
from sp_lightning.pipeline.gradients.gradient_memory import GradientMemory
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, UPDATE_KINDS, Backend, is_out_of_memory
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind, Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.optimizer.kinds import Step, StepInput
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.segment import Segment, note_stepped

PIECES_AT_ONCE = 2  # one is stepped while the next one arrives, or the last one leaves


def pack_state(unit: Unit, optimizer: Optimizer) -> bool:
    """Put the state of weights that are sent together in one block next to the masters, pinned as these are.

    State that is not there yet gets new memory, because existing memory may hold the state of another optimizer. If
    there is no memory, return False; the state stays where it is.
    """
    for segment in unit.segments:
        with without_torch_function():
            states = [optimizer.state.get(weight.master, {}) for weight in segment.weights]
        # A count of steps is read on the host, and a tensor without elements has no address.
        found = [
            (state, name, value)
            for name in dict.fromkeys(chain.from_iterable(states))
            for state in states
            if isinstance(value := state.get(name), Tensor) and name != "step" and value.numel()
        ]
        if not found:
            continue
        offsets, nbytes = lay_out([value.nbytes for *_, value in found])
        segment.memory.pin()
        before = segment.memory.companions.get("state")
        if before is not None and [value.data_ptr() - before.bytes.data_ptr() for *_, value in found] == offsets:
            continue
        segment.memory.release_companion("state")
        try:
            memory = segment.memory.get_companion("state", nbytes, pin=True).bytes
        except (MemoryError, OSError):  # Python's map raises the latter
            return False
        for (state, name, value), offset in zip(found, offsets, strict=True):
            state[name] = tensor_in(memory, offset, value, value.dtype).copy_(value)
    return True


class PieceBuffer:
    """Device memory for a piece."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.bytes = backend.allocate(nbytes)
        # done when its last piece has come down; at first, when the work that used the memory before is done
        self.ticket = backend.computed()


class Part(NamedTuple):
    """Some of the elements of a weight."""

    number: int  # the number of the weight in its segment
    begin: int
    memory: Memory


class Piece:
    """A part of a segment that visits the device in one go.

    Args:
        fields: For each name in `Memory`, the host memory in which the segment has it.
        parts: Parts of neighboring weights, in the order in which they lie there.
    """

    def __init__(self, fields: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
        self.host_parts = parts
        self._slices: dict[str, Tensor] = {}
        for name, memory in fields.items():
            tensors = [tensor for part in parts if (tensor := getattr(part.memory, name)) is not None]
            if tensors:
                begin = tensors[0].data_ptr() - memory.data_ptr()
                end = tensors[-1].data_ptr() + tensors[-1].nbytes - memory.data_ptr()
                self._slices[name] = memory[begin:end]
        first = parts[0].memory
        effort = Effort.of(first.low is not None, first.first_scale is not None)
        # bytes of the device's memory that its step reads and writes
        self.stepped_bytes = effort.nbytes * sum(part.memory.weight.numel() for part in parts)
        self._offsets, self.nbytes = lay_out([each.nbytes for each in self._slices.values()])

    def assign_buffer(self, buffer: PieceBuffer) -> None:
        """Have it visit in this buffer; `sent` has its new weights, and where they begin in the segment's place."""
        self.buffer = buffer
        self.up: list[tuple[Tensor, Tensor]] = []  # targets and sources
        self.down: list[tuple[Tensor, Tensor]] = []
        on_device: list[dict[str, Tensor]] = [{} for _ in self.host_parts]
        for (name, host), offset in zip(self._slices.items(), self._offsets, strict=True):
            device = buffer.bytes[offset : offset + host.nbytes]
            if name in ("weight", "copy"):  # the latter comes later, if there are copies
                self.sent = host.storage_offset(), device
            if name != "copy":
                self.up.append((device, host))
            if name != "gradient":
                self.down.append((host, device))
            for part, found in zip(self.host_parts, on_device, strict=True):
                tensor = getattr(part.memory, name)
                if tensor is not None:
                    begin = tensor.data_ptr() - host.data_ptr()
                    found[name] = device[begin : begin + tensor.nbytes].view(tensor.dtype)
        self.parts = [
            part._replace(memory=Memory(*map(found.get, Memory._fields)))
            for part, found in zip(self.host_parts, on_device, strict=True)
        ]


def pieces_of(segment: Segment, memories: Sequence[Memory], sums: Tensor | None) -> list[Piece]:
    """Divide a segment whose weights have this memory; `sums` has gradients, if they are on the host."""
    fields = dict.fromkeys(Memory._fields, segment.memory.companions["state"].bytes)
    fields.update(weight=segment.memory.bytes, copy=segment.source.bytes)
    if sums is not None:
        fields["gradient"] = sums
    # all elements in a line, on which each weight begins where a block does
    sizes = [memory.weight.numel() for memory in memories]
    *first, most = accumulate([-(-size // BLOCK) * BLOCK for size in sizes], initial=0)
    pieces: list[Piece] = []
    for start in range(0, most, PIECE):
        parts: list[Part] = []
        for number, memory in enumerate(memories):
            begin = max(0, start - first[number])
            end = min(sizes[number], start + PIECE - first[number])
            if begin < end:
                parts.append(Part(number, begin, part_of(memory, begin, end)))
        pieces.append(Piece(fields, parts))
    return pieces


class _Update(NamedTuple):
    """A visit's work on one weight."""

    one_pass: OnePass
    work: Work  # it has no gradient if that has stayed on the device
    gradient: Tensor
    factors: Sequence[Tensor]  # factors of the gradient


class Visit(DeferredTicket):
    """A step of a unit on the device; done when the host has the new masters and state.

    It begins as the next forward loads the unit, or when other code needs the masters.

    Attributes:
        ready: Done when the new weights are on the device.
        keeps_alive: The updates, with gradients that have stayed on the device.
    """

    keeps_alive: Sequence[_Update]
    steps_on_device = True

    def __init__(
        self,
        visits: Visits,
        of_segment: SegmentGradients,
        pieces: Sequence[Piece],
        updates: Sequence[_Update],
    ) -> None:
        # after the copies that bring gradients, or their scaling, to the host
        after = [] if of_segment.ticket is None else [of_segment.ticket]
        super().__init__(Job(self._begin_pieces, after, rank=BEFORE_OTHER_WORK))
        self.ready = DeferredTicket(self.job)
        self.keeps_alive = updates
        self._visits = visits
        self._unit = of_segment.unit
        self._segment = of_segment.segment
        self._pieces = pieces

    def begin(self, in_place: bool = True) -> Ticket:
        """Begin it, and return the ticket of the new weights; with `in_place`, it puts them into the unit's place.

        A forward may have these before the host has, so masters count as changed from now on.
        """
        segment, backend = self._segment, self._visits.backend
        self._unit.update.pending_visit = None
        self._is_placed = in_place
        note_stepped([segment], segment.weights)
        if in_place:
            backend.invalidate(segment.place)
        # computing has waited for all copies that read the masters
        self._earlier = backend.computed()
        backend.issue_when_ready(self.job)
        if self.job.done:
            self.job.join()  # raises the error of the requests, before other code relies on them
        if in_place:
            segment.epoch_on_device = segment.epoch
        return self.ready

    def _begin_pieces(self) -> None:
        """Ask the device for all pieces."""
        backend = self._visits.backend
        last: Sequence[Ticket] = ()
        # or tensors of a visit that an evaluation's forward begins could not be used in training
        with torch.inference_mode(False), self._visits.asking:
            passes: list[Pass] = []
            for one_pass, work, gradient, factors in self.keeps_alive:
                (step,) = one_pass.passes_of([work._replace(scaling=scaling_of(factors))])
                passes.append(step._replace(memory=step.memory._replace(gradient=gradient)))
            try:
                for piece in self._pieces:
                    last = self._send(piece, passes, last)
            except BaseException:
                # Others may get the memory that the pieces work with.
                for kind in UPDATE_KINDS:
                    backend.submit_to_lane(kind, Job()).join()
                raise
        self.ready.ticket, self.ticket = last

    def _send(
        self,
        piece: Piece,
        passes: Sequence[Pass],
        last: Sequence[Ticket],
    ) -> Sequence[Ticket]:
        """Ask for a piece after the last one; return when it is stepped, and when it has come down."""
        name, stats, trace = self._unit.name, self._visits.stats, self._visits.backend.trace
        up, down = (sum(target.nbytes for target, _ in copies) for copies in (piece.up, piece.down))
        # the last piece in this buffer may have failed, which does not concern this one
        earlier = [self._earlier, *[ticket for ticket in [piece.buffer.ticket] if not ticket.done]]
        come = Job(partial(self._copy, piece.up), earlier, up)
        arrived = trace.submit_to_lane(Kind.STATE_UP, name, come)
        action = partial(self._step, piece, passes, arrived)
        step = Job(action, [arrived, *last[:1]], piece.stepped_bytes)
        ready = trace.submit_to_lane(Kind.VISIT, name, step)
        leave = Job(partial(self._copy, piece.down), [ready, *last[1:]], down)
        gone = trace.submit_to_lane(Kind.STATE_DOWN, name, leave)
        piece.buffer.ticket = gone
        stats.bytes_to_device += up
        stats.bytes_to_host += down
        return ready, gone

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy a piece between host and device, in one of their lanes."""
        for target, source in pairs:
            self._visits.backend.copy(target, source)

    def _step(self, piece: Piece, passes: Sequence[Pass], arrived: Ticket) -> None:
        """Update a piece in its buffer, in a lane of its own, and put new weights where they are needed.

        If the device cannot, as it has no memory for that, the host updates the piece, which it still has as it was.
        """
        with untracked():
            try:
                _run(piece.parts, passes)
            except Exception as error:
                arrived.join()
                _run(piece.host_parts, passes)
                self._copy([(source, target) for target, source in piece.down])
                warnings.warn(
                    f"superpipeline: the CPU had to update a part of {self._unit.name!r}, "
                    f"because the GPU could not: {error}",
                    stacklevel=2,
                )
            if self._is_placed:
                start, sent = piece.sent
                self._segment.place[start : start + sent.nbytes].copy_(sent)


def _run(parts: Sequence[Part], passes: Sequence[Pass]) -> None:
    """Update parts of weights where they are, by the passes over the whole weights."""
    steps: list[Pass] = []
    for number, begin, memory in parts:
        if memory.gradient is None:
            end = begin + memory.weight.numel()
            gradient = flat(passes[number].memory.gradient)[begin:end]
            memory = memory._replace(gradient=gradient.to(memory.weight.device))
        steps.append(passes[number]._replace(memory=memory, begin=begin))
    run(steps)


class Visits:
    """Makes the visits of units.

    Attributes:
        begin_in_backward: Whether visits of a step in backward begin there, not as the next forward loads their units.
        why_not: The reason why a unit that is to visit was stepped on the host in this step; empty if there is none.
    """

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.backend = backend
        self.stats = stats
        self.begin_in_backward = True
        self.why_not = ""
        # one visit after the other takes buffers: two threads ask for visits
        self.asking = threading.Lock()
        # the pieces of each segment, and the memory in which its state and gradients lay for them
        self._known: dict[Segment, tuple[HostBuffer, GradientMemory | None, Sequence[Piece]]] = {}
        self._buffers: list[PieceBuffer] = []
        self._turns = count()  # which of them comes next

    def visit_of(self, step: Step, used: Mapping[Gradient, StepInput]) -> Visit | str:
        """Return a visit of a unit that makes this step with these gradients; or the reason why it cannot."""
        of_segment, *others = {gradient.of_segment for gradient in used}
        if others:
            return ""
        segment = of_segment.segment
        updates: list[_Update] = []
        no_pass = f"{type(step.optimizer).__name__} does not step all of their weights in one pass"
        for gradient, copy in zip(of_segment.gradients, segment.copies, strict=True):
            weight = gradient.weight
            if gradient not in used:
                return f"{weight.name!r} has no gradient"
            if weight.current_memory is not weight.engine_memory:
                return f"{weight.name!r} was given other memory"
            tensor, state = used[gradient]
            one_pass = step.one_passes[step.optimizer_weights.gradients[gradient]]
            if not one_pass.is_possible:
                return no_pass
            if not state:
                return ""  # the host makes it, once
            # other gradients are the user's, or are in memory that another step is to read soon
            is_at_hand = gradient.is_on_device or of_segment.memory_beside_masters.contains(tensor)
            if tensor is not gradient.tensor or not is_at_hand:
                return f"the gradient of {weight.name!r} was read, set or kept"
            is_readable = weight.dtype in (tensor.dtype, torch.float32)
            if not is_readable or len(gradient.factors) > MOST_FACTORS:
                return f"the gradient of {weight.name!r} is {tensor.dtype}, or scaled too often"
            # the device casts gradients and copies of any dtype
            if not one_pass.takes(Work(weight.engine_memory, None, state)):
                return no_pass
            work = Work(weight.engine_memory, None if gradient.is_on_device else tensor, state, copy)
            updates.append(_Update(one_pass, work, tensor, gradient.factors))
        if not any(update.work.weight.numel() for update in updates):
            return ""  # there is nothing to move
        if not pack_state(of_segment.unit, step.optimizer):
            return "CPU memory has no room for optimizer state in one block"
        try:
            pieces = self._pieces_of(of_segment, updates)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return "GPU memory has no room for a piece of optimizer state"
        return Visit(self, of_segment, pieces, updates)

    def _pieces_of(
        self,
        of_segment: SegmentGradients,
        updates: Sequence[_Update],
    ) -> Sequence[Piece]:
        """Return the pieces in which a segment visits; find them again if some of its memory has moved."""
        segment, gradients = of_segment.segment, of_segment.memory_beside_masters.memory
        state = segment.memory.companions["state"]
        known = self._known.get(segment)
        if known is not None and known[:2] == (state, gradients):
            return known[2]
        sums = None if gradients is None else gradients.bytes
        pieces = pieces_of(segment, [taken(update.work)[0] for update in updates], sums)
        most = max(piece.nbytes for piece in pieces)
        if self.nbytes() < PIECES_AT_ONCE * most:
            self.close()
            self._buffers = [PieceBuffer(most, self.backend) for _ in range(PIECES_AT_ONCE)]
        for piece in pieces:
            piece.assign_buffer(self._buffers[next(self._turns) % PIECES_AT_ONCE])
        self._known[segment] = state, gradients, pieces
        return pieces

    def end_step(self) -> None:
        """Warn, after an optimizer's step, if units were to visit, and none has visited yet."""
        if self.why_not and not self.stats.visits:
            warnings.warn(
                "The plan expected GPU updates of streamed units, but the slower CPU updates them, because "
                f"{self.why_not}.",
                stacklevel=2,
            )
        self.why_not = ""

    def nbytes(self) -> int:
        """Return the bytes of device memory for pieces."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the memory for pieces, when nothing is in it any more."""
        for buffer in self._buffers:
            with suppress(Exception):  # others have raised it
                buffer.ticket.join()
        self._buffers = []
        self._known.clear()
