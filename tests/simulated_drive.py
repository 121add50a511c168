"""A machine with a drive, on virtual clocks: the engine's own threads run in virtual time.

    host     a thread that steps units whose state is in RAM
    drive    a thread that steps units whose state is on the drive, piece by piece
    memory   moves what both step; they take turns, a piece each, and together are no faster than one alone
    read     from the drive to RAM
    write    back to the drive; each has a rate, and both together have another one

simulated.py does everything at once, and gives it its time later. Here all is done at its virtual time, because the
engine decides by what has happened so far: the thread of the drive reads ahead for a unit that is ready, and backward
waits for a landing buffer. Everything of the engine runs: its order of requests, its ring of buffers, its passes over
pieces. The thread of the drive is a real one, which runs only while nothing else does. A ticket that it joins suspends
it until the virtual moment at which that is done. When the main thread waits for a landing buffer, time passes until
one is free. Requests copy from the map of the file and back, as no real drive is needed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from typing_extensions import override

from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Pass
from sp_lightning.pipeline.gradients import gradient_memory
from sp_lightning.pipeline.lanes.lanes import Job, Worker
from sp_lightning.pipeline.optimizer import state_ring
from sp_lightning.pipeline.optimizer.state_file import StateFile

from .simulated import Lane, Pending, Shared, SimulatedBackend, SimulatedTicket, Span

LANE_OF_WORKER = {"drive": Lane.DRIVE, "read": Lane.READ, "write": Lane.WRITE}
# their jobs wait while they run
THREADS = (Lane.HOST, Lane.DRIVE)


class _Turns:
    """An action in a thread of its own, which takes turns with the caller."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._go_on, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        self._awaited: SimulatedTicket | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go_on.acquire()
        try:
            self._action()
        except BaseException as error:
            self._error = error
        self._awaited = None
        self._stops.release()

    def __iter__(self) -> Iterator[SimulatedTicket]:
        """Have it go on, until it waits for one ticket after the other."""
        while True:
            self._go_on.release()
            self._stops.acquire()
            if self._awaited is None:
                break
            yield self._awaited
        self._thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, ticket: SimulatedTicket) -> None:
        """Wait, in the thread."""
        self._awaited = ticket
        self._stops.release()
        self._go_on.acquire()


class _Worker(Worker):
    """A thread that the engine adds, in virtual time."""

    def __init__(self, backend: BackendWithDrive, lane: Lane) -> None:
        super().__init__(lane.value)
        self._backend = backend
        self._lane = lane

    @override
    def submit(self, job: Job) -> SimulatedTicket:  # type: ignore[override]
        return self._backend.ask_for(self._lane, job)

    @override
    def ready_jobs(self) -> list[Job]:
        return self._backend.ready_jobs(self._lane)

    @override
    def drain(self) -> None:
        self._backend.drain()


class _Condition:
    """Time passes while the main thread waits for it."""

    def __init__(self, backend: BackendWithDrive) -> None:
        self._backend = backend

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], Any]) -> Any:
        self._backend.put_in_order(begun=self._backend.main)
        while not (found := predicate()):
            self._backend.pass_time()
        return found


class BackendWithDrive(SimulatedBackend):
    """A device, a host and a drive with given bandwidths.

    Args:
        up: Bytes per second to the device.
        down: Bytes per second to the host.
        host: Bytes of host memory per second that steps read and write, state included.
        read: Bytes per second from the drive.
        write: Bytes per second to the drive.
        both_of_drive: Bytes per second of both together.
        per_byte: Bytes of host memory that a step moves for each byte that it is said to move.
        piece: The bytes of host memory after which it is another thread's turn.
    """

    defers = True

    def __init__(
        self,
        up: float,
        down: float,
        host: float,
        read: float,
        write: float,
        both_of_drive: float = math.inf,
        per_byte: float = 1.0,
        piece: float = 1 << 15,
    ) -> None:
        super().__init__(up, down, host, per_byte=per_byte)
        self._rates |= {Lane.READ: read, Lane.WRITE: write, Lane.MEMORY: host}
        self._of_drive = Shared(both_of_drive)
        self._piece = piece
        self._stepping: _Turns | None = None  # the job that the thread of the drive runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pieces take their time, and landing buffers are waited for in virtual time."""
        threads = SimpleNamespace(Condition=partial(_Condition, self))
        with (
            patch.object(state_ring, "run", self.step_piece),
            patch.object(gradient_memory, "threading", threads),
            patch.object(StateFile, "move", _copy),
        ):
            yield

    @override
    def add_worker(self, purpose: str) -> Worker:
        worker = _Worker(self, LANE_OF_WORKER[purpose])
        self.workers.append(worker)
        return worker

    @override
    def work(self, job: Job) -> SimulatedTicket:
        return self.ask_for(Lane.HOST, job)

    def ask_for(self, lane: Lane, job: Job) -> SimulatedTicket:
        """Have a thread run a job."""
        seconds = 0.0 if lane in THREADS else job.nbytes / self._rates[lane]
        return self._ask(lane, seconds, job.after, action=job.action, job=job)

    def ready_jobs(self, lane: Lane) -> list[Job]:
        """Return the jobs that a thread could begin now."""
        pending = [each for each in self._pending if each.lane is lane and each.ready <= self.main]
        return [each.job for each in pending if each.job is not None]

    def step_piece(self, passes: Sequence[Pass]) -> None:
        """Update a piece of a weight, in the thread of the drive."""
        run(passes)
        self._move(sum(_moved(step) for step in passes)).join()

    def _move(self, nbytes: float) -> SimulatedTicket:
        return self._ask(Lane.MEMORY, nbytes / self._rates[Lane.MEMORY], [])

    def _in_slices(self, job: Job) -> Iterator[SimulatedTicket]:
        """Run a job of the host, which takes turns in using its memory."""
        job.action()
        nbytes = job.nbytes * self._per_byte
        count = math.ceil(nbytes / self._piece)
        for _ in range(count):
            yield self._move(nbytes / count)

    def _by_turns(self, job: Job) -> Iterator[SimulatedTicket]:
        """Run a job of the drive, which joins tickets."""
        self._stepping = _Turns(job.action)
        yield from self._stepping

    @override
    def join(self, ticket: SimulatedTicket) -> None:
        if self._stepping is None or not self._stepping.is_here:
            super().join(ticket)
        elif ticket.waits or ticket.end > self.main:
            self._stepping.wait(ticket)

    def pass_time(self) -> None:
        """Have the next thing happen, for which the main thread waits."""
        begin, pending = self._first()
        self._give(pending, begin)
        self.main = max(self.main, begin)

    @override
    def _give(self, pending: Pending, begin: float) -> None:
        assert begin < math.inf, f"{pending.lane.value}: nothing can go on"
        main, self.main = self.main, begin
        if pending.lane in THREADS:
            assert pending.job is not None
            self._pending.remove(pending)
            self._free[pending.lane] = math.inf
            awaited = self._in_slices if pending.lane is Lane.HOST else self._by_turns
            self._go_on(pending, begin, awaited(pending.job))
        else:
            super()._give(pending, begin)
            pending.action()
        self.main = main

    def _go_on(self, pending: Pending, begin: float, awaited: Iterator[SimulatedTicket]) -> None:
        """Have a thread go on with its job until it waits, or the job is over."""
        ticket = next(awaited, None)
        if ticket is not None:
            self._ask(Lane.EVENTS, 0.0, [ticket], action=partial(self._go_on, pending, begin, awaited))
            return
        assert pending.job is not None
        pending.ticket.end = self._free[pending.lane] = self.main
        self.spans.append(Span(pending.lane, begin, self.main))
        pending.job.cleanup()

    @override
    def _needs(self, lane: Lane) -> list[tuple[Shared, float]]:
        if lane in (Lane.READ, Lane.WRITE):
            return [(self._of_drive, self._rates[lane])]
        return super()._needs(lane)


def _copy(file: StateFile, is_read: bool, memory: memoryview, offset: int) -> None:
    """Read from a file's map, or write there: no real drive is needed."""
    there = file.bytes.numpy().data[offset : offset + len(memory)]
    if is_read:
        memory[:] = there
    else:
        there[:] = memory


def _moved(step: Pass) -> int:
    """The bytes that an update reads and writes: weights and state twice, the gradient and the copy once."""
    memory = step.memory
    once = [memory.gradient, memory.copy]
    twice: list[Tensor | None] = [tensor for tensor in memory if all(tensor is not each for each in once)]
    return sum(tensor.nbytes for tensor in (*once, *twice, *twice) if tensor is not None)
