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

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, cycle
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from sp_lightning.optim.on_device import part_of
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Memory, Pass
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.optimizer.state_file import PAGE, StateFile, StatePlaces, check_folder, nbytes_of, padded
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer

BUFFER = 8 << 20
"""Bytes of a buffer, and of the largest request."""
BUFFERS = 8
CUT = 1 << 17
"""Weights are cut at multiples of this number of elements: each field of a part has whole pages, scales too."""
# the rank of the first job whose pieces are read; those of others are not negative
_BEFORE_ALL_OTHERS = -(1 << 40)


class Piece(NamedTuple):
    """A range of the elements of a weight, whose state fits in a buffer."""

    unit: Unit
    number: int  # the number of the weight in its step
    begin: int
    end: int
    file: StateFile
    state: dict[str, Any]  # tensors in the map of the file, by the names of `Memory`
    nbytes: int  # of whole pages


def pieces_of(unit: Unit, states: Sequence[tuple[StateFile, Memory]]) -> Iterator[Piece]:
    """Divide the weights of a unit into pieces; the file of each has its state."""
    for number, (file, memory) in enumerate(states):
        size = memory.weight.numel()
        state = memory._replace(weight=None)
        nbytes = sum(tensor.nbytes for tensor in state if tensor is not None)
        most = BUFFER - len(state) * PAGE  # each field is padded
        length = max(CUT, most * size // (nbytes or 1) // CUT * CUT)
        for begin in range(0, size, length):
            end = min(begin + length, size)
            fields = part_of(state, begin, end)._asdict().items()
            tensors = {name: tensor for name, tensor in fields if tensor is not None}
            yield Piece(unit, number, begin, end, file, tensors, nbytes_of(tensors))


class UnitOnDrive(Job):
    """The job that steps a unit whose state is on the drive."""

    pieces: Iterator[Piece]


class _Buffer:
    """A buffer, which pieces pass through."""

    # the piece in it, and the job that steps it
    piece: Piece
    job: UnitOnDrive | None = None

    def __init__(self, backend: Backend) -> None:
        self.memory = HostBuffer(BUFFER, backend, pin=False).bytes
        self.ticket: Ticket = backend.computed()  # the last request

    def step(self, passes: Sequence[Pass]) -> None:
        """Update the piece by the passes over whole weights."""
        _, number, begin, end, _, tensors, _ = self.piece
        state: dict[str, Any] = {}
        offset = 0
        for name, tensor in tensors.items():
            state[name] = self.memory[offset : offset + tensor.nbytes].view(tensor.dtype)
            offset += padded(tensor.nbytes)
        memory = part_of(passes[number].memory, begin, end)._replace(**state)
        run([passes[number]._replace(memory=memory, begin=begin)])


class StateRing:
    """Steps units whose state is on a drive.

    Args:
        folder: The folder of the files.
        backend: The backend, which drains and closes the threads.
        stats: Counts the bytes.
    """

    def __init__(self, folder: str, backend: Backend, stats: Stats) -> None:
        check_folder(folder)
        self.places = StatePlaces(folder)
        self._backend = backend
        self._stats = stats
        self.worker, self._reader, self._writer = map(backend.add_worker, ("drive", "read", "write"))
        self._buffers = [_Buffer(backend) for _ in range(BUFFERS)]
        self._turns = cycle(self._buffers)
        # buffers with pieces that are to be stepped, in this order
        self._coming: deque[_Buffer] = deque()
        self._reading: UnitOnDrive | None = None  # the job whose pieces are asked for
        self._ranks = count(_BEFORE_ALL_OTHERS)
        self._error: BaseException | None = None  # the first one

    def step(self, job: UnitOnDrive, passes: Sequence[Pass]) -> None:
        """Update a unit by the passes over its whole weights; runs in the thread of `worker`."""
        self.check()
        try:
            # it has failed before its update
            while self._coming and self._coming[0].job is not job:
                self._coming.popleft()
            if job.rank >= 0:
                self._reading = job
            self._read_ahead()
            while self._coming and self._coming[0].job is job:
                buffer = self._coming.popleft()
                buffer.ticket.join()
                update = Job(partial(buffer.step, passes))
                self._backend.trace.work(Kind.STEP, buffer.piece.unit.name, update, Job.run).join()
                self._request(Kind.WRITE, buffer)
                self._read_ahead()
        except BaseException as error:
            self._error = self._error or error
            raise

    def _read_ahead(self) -> None:
        """Ask for the next pieces, see [Note: order on the drive]."""
        while len(self._coming) < BUFFERS and self._reading is not None:
            job = self._reading
            if job.rank >= 0:
                job.rank = next(self._ranks)
            piece = next(job.pieces, None)
            if piece is None:
                ready = self.worker.ready_jobs()
                later = [job for job in ready if isinstance(job, UnitOnDrive) and job.rank >= 0]
                self._reading = min(later, key=attrgetter("rank"), default=None)
                continue
            buffer = next(self._turns)
            buffer.job, buffer.piece = job, piece
            self._request(Kind.READ, buffer)
            self._coming.append(buffer)

    def _request(self, kind: Kind, buffer: _Buffer) -> None:
        """Have the piece in a buffer read or written."""
        piece = buffer.piece
        job = Job(partial(self._move, kind, buffer.memory, piece), nbytes=piece.nbytes)
        worker = self._writer
        if kind is Kind.READ:
            worker = self._reader
            job.after = [each.ticket for each in self._buffers if each.job and each.piece.unit is piece.unit]
            self._stats.bytes_to_drive += job.nbytes
        buffer.ticket = self._backend.trace.work(kind, piece.unit.name, job, worker.submit)

    def _move(self, kind: Kind, memory: Tensor, piece: Piece) -> None:
        """Read a piece into memory, or write it."""
        is_read = kind is Kind.READ
        if is_read:
            self._backend.invalidate(memory)
        pages = memory.numpy().data
        try:
            for tensor in piece.state.values():
                nbytes = padded(tensor.nbytes)
                piece.file.move(is_read, pages[:nbytes], piece.file.offset_of(tensor))
                pages = pages[nbytes:]
        except OSError as error:
            self._error = self._error or RuntimeError(
                f"`nvme_path={self.places.folder!r}`: the drive could not {kind.label} optimizer state of "
                f"{piece.unit.name!r}: {error.strerror}."
            )
            raise self._error from error

    def settle(self) -> None:
        """Wait until all state is in the files, for those who use their maps; raise if it is not complete."""
        self._writer.drain()
        self.check()

    def check(self) -> None:
        """Raise if anything has failed: see [Note: a failure is lasting]."""
        if self._error is not None:
            raise RuntimeError(
                f"An update with state in `nvme_path={self.places.folder!r}` has failed: {self._error} Weights "
                "and state do not belong together any more, and are not saved. Continue from the last checkpoint."
            ) from self._error
