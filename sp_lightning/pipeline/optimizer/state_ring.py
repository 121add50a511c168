"""Steps of units whose optimizer state is on a drive: it is read, stepped and written piece by piece.

    file (state_file.py)                 one of few buffers, which take turns
    state of a piece ---- a thread ----> state
                                         the pass over the piece: masters, gradients and copies where they lie
    state of a piece <--- a thread ----- state

The steps have a thread of their own: while it waits for the drive, the one for other work on host memory goes on.

[Note: order on the drive]
The thread that steps also says what is read next, so it never waits for a buffer: up to `BUFFERS` pieces ahead, of the
unit that it steps, and then of one that could be stepped now. That unit is the next one for sure (its rank is lower
than all others), so no other one needs a buffer before it. A buffer is read into when it was written, and a unit is
read when all of it was written.

[Note: a failure is lasting]
After an error of the drive, or in the middle of an update, masters and state do not belong together any more. So all
later steps raise it, and so does whatever would save the state.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import NamedTuple

from torch import Tensor

from sp_lightning.optim.on_device import part_of
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Memory, Pass
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.optimizer.state_file import PAGE, StateFile, StatePlaces, check_folder, padded
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer

BUFFER = 8 << 20
"""Bytes of a buffer, and of the largest request."""
BUFFERS = 8
CUT = 1 << 17
"""Weights are cut at multiples of this number of elements: each field of a part has whole pages, scales too."""
_BEFORE_ALL_OTHERS = -(1 << 40)  # a rank

State = tuple[StateFile, Memory]
"""A weight with its state, and the file that has the state."""


class _Part(NamedTuple):
    """A range of a weight, and where its state lies in a buffer, by the names of `Memory`."""

    number: int  # the number of the weight in its step
    begin: int
    end: int
    fields: dict[str, tuple[int, Tensor]]


class _Request(NamedTuple):
    """Bytes to read or write at once."""

    file: StateFile
    offset: int
    begin: int  # where they lie in the buffer
    nbytes: int


class Piece:
    """State that fits in a buffer, of neighboring weights."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.requests: list[_Request] = []
        self.nbytes = 0

    def add(self, number: int, state: State, begin: int, end: int) -> bool:
        """Add a range of a weight, if there is room for its state."""
        file, memory = state
        fields = part_of(memory._replace(weight=None, gradient=None, copy=None), begin, end)
        named = {name: tensor for name, tensor in fields._asdict().items() if tensor is not None}
        if self.nbytes + sum(padded(tensor.nbytes) for tensor in named.values()) > BUFFER:
            return False
        places: dict[str, tuple[int, Tensor]] = {}
        for name, tensor in named.items():
            places[name] = self.nbytes, tensor
            self._request(file, file.offset_of(tensor), padded(tensor.nbytes))
        self.parts.append(_Part(number, begin, end, places))
        return True

    def _request(self, file: StateFile, offset: int, nbytes: int) -> None:
        """Request bytes; those that follow the last ones in the file come with them."""
        begin = self.nbytes
        self.nbytes += nbytes
        if self.requests:
            last = self.requests[-1]
            if last.file is file and last.offset + last.nbytes == offset:
                self.requests[-1] = last._replace(nbytes=last.nbytes + nbytes)
                return
        self.requests.append(_Request(file, offset, begin, nbytes))

    def steps(self, passes: Sequence[Pass], buffer: Tensor) -> Iterator[Pass]:
        """Yield the passes over its parts, whose state is in a buffer, by the passes over whole weights."""
        for number, begin, end, fields in self.parts:
            whole = passes[number]
            state = {
                name: buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
                for name, (offset, tensor) in fields.items()
            }
            yield whole._replace(memory=part_of(whole.memory, begin, end)._replace(**state), begin=begin)


def pieces_of(states: Sequence[State]) -> Iterator[Piece]:
    """Divide the state of weights into pieces."""
    piece = Piece()
    for number, state in enumerate(states):
        memory = state[1]
        size = memory.weight.numel()
        nbytes = sum(tensor.nbytes for tensor in memory._replace(weight=None) if tensor is not None)
        most = BUFFER - len(memory) * PAGE  # each field is padded
        length = size if nbytes <= most else most * size // nbytes // CUT * CUT
        for begin in range(0, size, length or 1):
            end = min(begin + length, size)
            if not piece.add(number, state, begin, end):
                yield piece
                piece = Piece()
                piece.add(number, state, begin, end)
    if piece.parts:
        yield piece


def _run_here(job: Job) -> Job:
    job.run()
    return job


class UnitOnDrive(Job):
    """The job that steps a unit whose state is on the drive.

    Args:
        ring: Steps it.
        unit: The unit.
        states: Its weights, in the order of its passes.
        action: Does all of the step; its last argument is a function that makes the passes.
        after: Tickets that have to be done before it starts.
        cleanup: Is called afterwards in any case.
    """

    def __init__(
        self,
        ring: StateRing,
        unit: Unit,
        states: Sequence[State],
        action: Callable[..., None],
        after: Sequence[Ticket],
        cleanup: Callable[[], None],
    ) -> None:
        super().__init__(partial(action, partial(ring.step, self)), after, cleanup=cleanup)
        self.unit = unit
        self.submit = ring.worker.submit
        self.pieces = pieces_of(states)
        self.is_next = False  # whether its first pieces are read


@dataclass(eq=False)
class _Buffer:
    """A buffer, and the last request for it."""

    memory: Tensor
    view: memoryview
    ticket: Ticket
    unit: Unit | None = None


class _Coming(NamedTuple):
    """A piece that is read, or is to be."""

    job: UnitOnDrive
    piece: Piece
    buffer: _Buffer


class StateRing:
    """Steps units whose state is on a drive.

    Args:
        folder: The folder of the files, for errors.
        backend: The backend, which drains and closes the threads.
        stats: Counts the bytes.
    """

    def __init__(self, folder: str, backend: Backend, stats: Stats) -> None:
        check_folder(folder)
        self.places = StatePlaces(folder, self.settle)
        self._folder = folder
        self._backend = backend
        self._stats = stats
        self.worker, self._reader, self._writer = map(backend.add_worker, ("drive", "read", "write"))
        self._buffers: list[_Buffer] = []
        self._turns: Iterator[_Buffer] = iter(())
        self._ranks = count(_BEFORE_ALL_OTHERS)
        self._coming: deque[_Coming] = deque()
        self._reading: UnitOnDrive | None = None  # the job whose pieces are asked for
        self.error: BaseException | None = None  # the first one

    def step(self, job: UnitOnDrive, passes: Sequence[Pass]) -> None:
        """Update a unit by the passes over its whole weights; runs in the thread of `worker`."""
        self.check()
        try:
            if not self._buffers:
                self._make_buffers()
            while self._coming and self._coming[0].job is not job:  # it has failed before its update
                self._coming.popleft()
            if not job.is_next:
                self._read_pieces_of(job)
            self._read_ahead()
            while self._coming and self._coming[0].job is job:
                _, piece, buffer = self._coming.popleft()
                buffer.ticket.join()
                steps = list(piece.steps(passes, buffer.memory))
                moved = sum(2 * step.memory.weight.nbytes + step.memory.gradient.nbytes for step in steps)
                update = Job(partial(run, steps), nbytes=moved)
                self._backend.trace.work(Kind.STEP, job.unit.name, update, _run_here).join()
                self._request(Kind.WRITE, os.pwritev, piece, buffer, job.unit)
                self._read_ahead()
        except BaseException as error:
            self.error = self.error or error
            raise

    def _make_buffers(self) -> None:
        done = self._backend.computed()
        for _ in range(BUFFERS):
            memory = HostBuffer(BUFFER, self._backend, pin=False).bytes
            self._buffers.append(_Buffer(memory, memory.numpy().data, done))
        self._turns = cycle(self._buffers)

    def _read_pieces_of(self, job: UnitOnDrive) -> None:
        job.is_next = True
        job.rank = next(self._ranks)
        self._reading = job

    def _read_ahead(self) -> None:
        """Ask for the next pieces, see [Note: order on the drive]."""
        while len(self._coming) < BUFFERS and self._reading is not None:
            piece = next(self._reading.pieces, None)
            if piece is not None:
                buffer = next(self._turns)
                self._request(Kind.READ, os.preadv, piece, buffer, self._reading.unit)
                self._coming.append(_Coming(self._reading, piece, buffer))
                continue
            ready = self.worker.ready_jobs()
            later = [job for job in ready if isinstance(job, UnitOnDrive) and not job.is_next]
            self._reading = None
            if later:
                self._read_pieces_of(min(later, key=lambda job: job.rank))

    def _request(self, kind: Kind, call: Callable[..., int], piece: Piece, buffer: _Buffer, unit: Unit) -> None:
        """Have a piece read or written, after the last request for its buffer, and all for the unit."""
        after = [other.ticket for other in self._buffers if other is buffer or other.unit is unit]
        after = [buffer.ticket] if kind is Kind.WRITE else after
        job = Job(partial(self._move, call, piece, buffer, unit.name), after, piece.nbytes)
        worker = self._reader if kind is Kind.READ else self._writer
        buffer.unit = unit
        buffer.ticket = self._backend.trace.work(kind, unit.name, job, worker.submit)

    def _move(self, call: Callable[..., int], piece: Piece, buffer: _Buffer, name: str) -> None:
        """Read or write a piece."""
        is_read = call is os.preadv
        if is_read:
            self._backend.invalidate(buffer.memory)
        try:
            for file, offset, begin, nbytes in piece.requests:
                end = begin + nbytes
                while begin < end:
                    moved = call(file.fd, [buffer.view[begin:end]], offset)
                    if not moved:
                        raise OSError(errno.EIO, "the file has ended")
                    begin, offset = begin + moved, offset + moved
        except OSError as error:
            self.error = self.error or RuntimeError(
                f"`nvme_path={self._folder!r}`: the drive could not {'read' if is_read else 'write'} optimizer state "
                f"of {name!r}: {error.strerror}."
            )
            raise self.error from error
        if is_read:
            self._stats.bytes_read += piece.nbytes
        else:
            self._stats.bytes_written += piece.nbytes

    def settle(self) -> None:
        """Wait until all state is in the files, for those who use their maps; raise if it is not complete."""
        self._writer.drain()
        self.check()

    def check(self) -> None:
        """Raise if something has ever failed."""
        if self.error is not None:
            raise RuntimeError(
                f"An update with optimizer state in `nvme_path={self._folder!r}` has failed: {self.error} Weights and "
                "state do not belong together any more, and are not saved. Continue from the last checkpoint."
            ) from self.error
