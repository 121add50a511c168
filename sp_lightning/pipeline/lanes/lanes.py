"""Lanes: the work of each, tickets for work that is under way, and a thread that works on host memory.

    compute     forward and backward of units, and stalls, in which computing waits for a copy
    to device   weights, activations that come back, and optimizer state that visits
    to host     gradients, activations that leave, and that state after its update
    visits      optimizer steps on the device, in parallel to computing
    host        optimizer steps of units, and accumulation of gradients
    from drive  optimizer state, and its way back to the drive
    to drive

Timeline, planner and callback read a `Recording`, which `Trace` in backend.py makes on request.
"""

from __future__ import annotations

import contextlib
import enum
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

from typing_extensions import override

from sp_lightning.pipeline.lanes.at_work import FORKED, OfOneProcess


class Lane(enum.Enum):
    """One of the resources that work in parallel."""

    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    VISIT = "visits"
    HOST = "host"
    FROM_DRIVE = "from drive"
    TO_DRIVE = "to drive"


class Kind(enum.Enum):
    """The purpose of a span of time, and the lane that it occupies."""

    FORWARD = "forward", Lane.COMPUTE
    BACKWARD = "backward", Lane.COMPUTE
    STALL = "stall", Lane.COMPUTE
    LOAD = "load", Lane.TO_DEVICE
    FETCH = "fetch", Lane.TO_DEVICE
    GRADIENTS = "gradients", Lane.TO_HOST
    # They have waited on the device for their unit's update.
    LATE_GRADIENTS = "late gradients", Lane.TO_HOST
    OFFLOAD = "offload", Lane.TO_HOST
    STATE_UP = "state up", Lane.TO_DEVICE
    STATE_DOWN = "state down", Lane.TO_HOST
    VISIT = "visit", Lane.VISIT
    STEP = "step", Lane.HOST
    ADD = "add", Lane.HOST
    READ = "read", Lane.FROM_DRIVE
    WRITE = "write", Lane.TO_DRIVE

    def __init__(self, label: str, lane: Lane) -> None:
        self.label = label
        self.lane = lane


class Span(NamedTuple):
    """One piece of work on a lane, in seconds since the start of the recording.

    Its name is that of the unit that it was for. A stall has the name of the work that computing waited for.
    """

    lane: Lane
    kind: Kind
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Recording:
    """The course of a few steps; complete once the scope of `Pipeline.record` is left.

    Attributes:
        spans: All pieces of work, sorted by when they began. Stalls lie within forwards and backwards, or between them.
        steps: The begin and the end of each step. A step's work may end in the next step: they overlap.
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


class Origin(NamedTuple):
    """The moment at which a recording began, on the device's clock and on the host's."""

    device: Any
    host: float


class Ticket(ABC):
    """A handle to a copy in flight, or to a job on the host.

    Attributes:
        keeps_alive: Objects that it reads on the device. They may be freed once computing waits for its results.
        steps_on_device: Whether it is an optimizer step whose weights computing can use before the host has them.
    """

    keeps_alive: Sequence[object] = ()
    steps_on_device = False

    @abstractmethod
    def join(self) -> None:
        """Block the calling thread until the copy or job is done; raise its exception if it failed."""

    def join_briefly(self) -> None:
        """Block until it is done; only for a moment if it may depend on other processes."""
        self.join()

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `join` would return at once."""

    def interval(self, origin: Origin) -> tuple[float, float]:
        """Return its begin and end, in seconds since the origin; a copy has them if it was timed (`Backend.timed`)."""
        raise NotImplementedError

    def issued(self) -> Ticket:
        """Return the ticket of the work on the device, for which computing can wait; block until it was issued."""
        return self


def do_nothing() -> None:
    """Do nothing: the job is done when the tickets before it are."""


class Job(Ticket):
    """A job for a worker, and the ticket for it.

    Args:
        action: The work.
        after: Tickets that have to be done before it starts. If one of them failed, the job fails with it.
        nbytes: Bytes of memory that it reads and writes: the host's, or the device's for an update there. Recordings
            have them, and devices with simulated time take that long for the work.
        cleanup: Is called afterwards in any case, even if the job or one of the tickets has failed.
        rank: The lowest rank of the jobs that are ready runs first, and among equals the one submitted first.
    """

    done = False  # an attribute, as it is asked for often

    def __init__(
        self,
        action: Callable[[], None] = do_nothing,
        after: Sequence[Ticket] = (),
        nbytes: int = 0,
        cleanup: Callable[[], None] = do_nothing,
        rank: int = 0,
    ) -> None:
        self.action = action
        self.after = after
        self.nbytes = nbytes
        self.cleanup = cleanup
        self.rank = rank
        self.error: BaseException | None = None
        # The lock is held until the job is done; an `Event` would be several objects.
        self.under_way = threading.Lock()
        self.under_way.acquire()

    @override
    def join(self) -> None:
        if not self.done:
            with self.under_way:
                pass
        if self.error is not None:
            raise self.error

    @override
    def interval(self, origin: Origin) -> tuple[float, float]:
        self.join()
        return self.began - origin.host, self.ended - origin.host

    @property
    def is_ready(self) -> bool:
        """Whether all tickets before it are done."""
        return all(ticket.done for ticket in self.after)

    def run(self, failed: BaseException | None = None) -> Job:
        """Run the job in this thread, and return it; `failed` is the error with which the thread has started."""
        try:
            if failed is not None:
                raise failed
            self._await_earlier()
            self.began = time.perf_counter()
            self.action()
        except BaseException as error:
            self.error = error
        self.ended = time.perf_counter()
        try:
            self.cleanup()
        except BaseException as error:
            self.error = self.error or error
        self.finish()
        return self

    def _await_earlier(self) -> None:
        # This is a function of its own: a variable of `run` would keep the last ticket, and device memory, too long.
        for earlier in self.after:
            earlier.join()

    def finish(self) -> None:
        """Mark the job as done, and wake its waiters; before that, release the objects that it refers to."""
        self.action = self.cleanup = do_nothing
        self.after = ()
        self.done = True
        self.under_way.release()


class DeferredTicket(Ticket):
    """A ticket for work that a job issues to a device later; the job may not even have been submitted."""

    ticket: Ticket  # the ticket of that work, once the job is done, unless it has failed

    def __init__(self, job: Job) -> None:
        self.job = job

    @override
    def join(self) -> None:
        self.issued().join()

    @property
    @override
    def done(self) -> bool:
        return self.job.done and (self.job.error is not None or self.ticket.done)

    @override
    def interval(self, origin: Origin) -> tuple[float, float]:
        return self.issued().interval(origin)

    @override
    def issued(self) -> Ticket:
        self.job.join()
        return self.ticket


class Worker(OfOneProcess):
    """A thread that runs the most urgent of the jobs that are ready. The first job starts it.

    A job is ready when all tickets that it comes after are done. The ready job with the lowest rank runs first, and
    among equals the one submitted first. If none is ready, the thread waits for the tickets of the one submitted first:
    copies end in the order in which they begin, and a job is always submitted after the jobs that it waits for. Other
    processes may wait for a job that comes later, so the thread looks at the other jobs in between.
    """

    def __init__(
        self,
        name: str,
        on_start: Callable[[], None] = do_nothing,
        max_delay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._name = name
        self._on_start = on_start
        # The longest random delay before each job, in seconds.
        self._max_delay = max_delay
        self._seed = seed
        self._random = random.Random(f"{name} {seed}")
        self._thread: threading.Thread | None = None
        self._jobs: list[Job] = []  # jobs that are not done, in the order of submission
        # An item has the thread look for jobs. There may be too many: an interrupt may come as a job is submitted.
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        self._is_closing = False

    def submit(self, job: Job) -> Job:
        """Have a job run, and return it."""
        if self.is_forked:
            raise RuntimeError(FORKED)
        if self._thread is None:
            self._is_closing = False
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.append(job)
        self._wake_ups.put(None)
        return job

    def like(self, purpose: str) -> Worker:
        """Return another thread that starts as this one does, with delays of its own."""
        return Worker(f"superpipeline-{purpose}", self._on_start, self._max_delay, self._seed)

    def ready_jobs(self) -> list[Job]:
        """Return the jobs that could run now."""
        return [job for job in tuple(self._jobs) if job.is_ready]

    def drain(self) -> None:
        """Block until every job is done."""
        # A job that compiles calls this: it cannot wait for itself.
        if self.is_forked or threading.current_thread() is self._thread:
            return
        self._wake_ups.put(None)
        while unfinished := [job for job in tuple(self._jobs) if not job.done]:
            for job in unfinished:
                with job.under_way:
                    pass

    def close(self) -> None:
        """Finish all jobs, and end the thread."""
        if self._thread is not None and self._thread.ident is not None and not self.is_forked:
            self._is_closing = True
            self._wake_ups.put(None)
            self._thread.join()
            self._thread = None

    @override
    def note_fork(self) -> None:
        """Let the jobs under way fail in the fork: no thread runs them there."""
        super().note_fork()
        for job in self._jobs:
            if not job.done:
                job.error = RuntimeError(FORKED)
                job.done = True

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            self._on_start()
        except BaseException as error:
            failed = error  # each job fails with it, so that its waiters get the error
        while (job := self._next()) is not None:
            if self._max_delay:
                time.sleep(self._random.uniform(0, self._max_delay))
            job.run(failed)
            self._jobs.remove(job)

    def _next(self) -> Job | None:
        """Wait for the next job, and return it; None if there is none, and the thread is to end."""
        while self._jobs or not self._is_closing:
            if not self._jobs:
                self._wake_ups.get()
                continue
            ready = self.ready_jobs()
            if ready:
                return min(ready, key=attrgetter("rank"))
            for ticket in self._jobs[0].after:
                # The job will fail with this error, and raise it for its waiters.
                with contextlib.suppress(BaseException):
                    ticket.join_briefly()
        return None
