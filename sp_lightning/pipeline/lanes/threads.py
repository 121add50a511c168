"""Threads that copy, and one that works on host memory."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.lanes import Origin, Ticket

_callbacks_change = threading.Lock()  # one for all tickets: it is held for an instant


class ThreadTicket(Ticket):
    """A job of a thread, done when the thread says so."""

    def __init__(self) -> None:
        self._is_done = False
        self._under_way = threading.Lock()  # held until the job is done; an `Event` would be several objects
        self._under_way.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self._is_ending = False
        self.error: BaseException | None = None
        self._began = self._ended = 0.0

    @override
    def join(self) -> None:
        if not self._is_done:
            with self._under_way:
                pass
        if self.error is not None:
            raise self.error

    @property
    @override
    def done(self) -> bool:
        return self._is_done

    @override
    def interval(self, origin: Origin) -> tuple[float, float]:
        return self._began - origin.host, self._ended - origin.host

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the job, which runs in this scope."""
        self._began = perf_counter()
        try:
            yield
        finally:
            self._ended = perf_counter()

    @override
    def when_done(self, callback: Callable[[], None]) -> None:
        with _callbacks_change:
            if not self._is_ending:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self) -> None:
        """Mark the job as done, call callbacks, and wake whoever waits for it."""
        with _callbacks_change:
            self._is_ending = True
        for callback in self._callbacks:  # before anybody can see that the job is done
            callback()
        self._callbacks = []
        self._is_done = True
        self._under_way.release()


@dataclass(eq=False)
class _Job:
    """A job for a thread.

    Attributes:
        action: The work.
        after: Tickets that have to be done before it starts.
        ticket: Done when the job is.
        cleanup: Called afterwards in any case.
        rank: Urgency; the lowest runs first.
        number: Its position in the order of submission.
    """

    action: Callable[[], None]
    after: Sequence[Ticket]
    ticket: ThreadTicket
    cleanup: Callable[[], None]
    rank: int = 0
    number: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether all that has to be done before it is."""
        return all(ticket.done for ticket in self.after)


class _JobThread(ABC):
    """A thread that runs jobs. The first job starts it.

    Args:
        name: The thread's name.
        on_start: Called in the thread before its first job.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        self._name = name
        self._on_start = on_start or _do_nothing
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    @abstractmethod
    def _next(self) -> _Job | None:
        """Wait for the next job, and return it; None if the thread is to end."""

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            self._on_start()
        except BaseException as error:
            failed = error  # whoever waits for a job has to hear of it
        while (job := self._next()) is not None:
            ticket = job.ticket
            _run_job(job, failed)
            del job  # so that what it held is free by the time its ticket is done
            ticket.finish()
            del ticket


class CopyThread(_JobThread):
    """A thread that runs jobs in the order of submission, like a copy engine.

    A job that has to wait for another thread's is submitted when that is done, so that it holds up no other.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        super().__init__(name, on_start)
        self._jobs: queue.SimpleQueue[_Job | None]
        self._jobs = queue.SimpleQueue()
        self._count_changes = threading.Lock()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether a job is in the queue or running."""
        return self._count > 0

    def submit(self, action: Callable[[], None], after: Ticket | None = None) -> ThreadTicket:
        """Submit a job, which runs after all that are in the queue when `after` is done.

        Args:
            action: The work.
            after: Ticket that has to be done before it starts. If that failed, the job fails with it.
        """
        self._start()
        job = _Job(action, () if after is None else (after,), ThreadTicket(), self._uncount)
        if after is None:
            self._put(job)
        else:
            after.when_done(lambda: self._put(job))
        return job.ticket

    def _put(self, job: _Job) -> None:
        with self._count_changes:
            self._count += 1
        self._jobs.put(job)

    def _uncount(self) -> None:
        with self._count_changes:
            self._count -= 1

    def drain(self) -> None:
        """Block until every job in the queue is done, which those that wait for another thread's are not in yet."""
        if self._thread is not None:
            self.submit(_do_nothing).join()

    def close(self) -> None:
        """Finish all jobs, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    @override
    def _next(self) -> _Job | None:
        return self._jobs.get()


class Worker(_JobThread):
    """A thread that runs the most urgent of the jobs that are ready.

    A job is ready when all tickets in its `after` are done. Of the ready ones, the lowest rank runs first, and among
    equals the one submitted first. If none is ready, the thread waits for the tickets of the one submitted first:
    copies end in the order in which they begin, and a job is always submitted after the jobs that it waits for.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        super().__init__(name, on_start)
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._submitted = 0
        self._is_working = False
        self._closing = False

    def submit(
        self,
        action: Callable[[], None],
        after: Sequence[Ticket] = (),
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> ThreadTicket:
        """Submit a job.

        Args:
            action: The work.
            after: Tickets that have to be done before it starts. If one of them failed, the job fails with it.
            cleanup: Called afterwards in any case.
            rank: Urgency; the lowest runs first.
        """
        self._start()
        ticket = ThreadTicket()
        with self._changed:
            self._submitted += 1
            job = _Job(action, after, ticket, cleanup or _do_nothing, rank, self._submitted)
            insort(self._waiting, job, key=lambda waiting: (waiting.rank, waiting.number))
            self._changed.notify_all()
        return ticket

    def drain(self) -> None:
        """Block until every job is done."""
        if threading.current_thread() is self._thread:  # called by a job, one that compiles: it cannot wait for itself
            return
        with self._changed:
            while self._waiting or self._is_working:
                self._changed.wait()

    def close(self) -> None:
        """Finish all jobs, and end the thread."""
        if self._thread is not None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            self._thread, self._closing = None, False

    @override
    def _next(self) -> _Job | None:
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            while not self._waiting and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return None
            chosen = self._most_urgent()
            if chosen is not None:
                return self._take(chosen)
            oldest = min(self._waiting, key=lambda waiting: waiting.number)
        for ticket in oldest.after:
            with contextlib.suppress(BaseException):  # the job will fail with it, and tell whoever waits for the job
                ticket.join()
        with self._changed:
            return self._take(self._most_urgent() or oldest)

    def _most_urgent(self) -> _Job | None:
        """Return the most urgent job that is ready; None if none is."""
        return next((waiting for waiting in self._waiting if waiting.is_ready), None)

    def _take(self, chosen: _Job) -> _Job:
        self._waiting.remove(chosen)
        self._is_working = True
        return chosen


def _run_job(job: _Job, failed: BaseException | None) -> None:
    try:
        if failed is not None:
            raise failed
        for earlier in job.after:
            earlier.join()
        with job.ticket.timed():
            job.action()
    except BaseException as error:
        job.ticket.error = error
    job.cleanup()
    del job  # an error's traceback keeps this frame alive


def _do_nothing() -> None:
    pass


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; `Tensor.copy_` would start a second pool of OpenMP threads in a second thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
