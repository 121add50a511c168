"""Threads that copy, and that work on host memory."""

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

from sp_lightning.pipeline.transfer.lanes import Origin, Ticket


class ThreadTicket(Ticket):
    """Done when a thread says so."""

    def __init__(self) -> None:
        self._is_done = False
        self._under_way = threading.Lock()  # held until then; an `Event` is made of several objects
        self._under_way.acquire()
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
    def at_work(self) -> Iterator[None]:
        """Around what the thread does."""
        self._began = perf_counter()
        try:
            yield
        finally:
            self._ended = perf_counter()

    def finish(self) -> None:
        """The thread is done with it."""
        self._is_done = True
        self._under_way.release()


@dataclass(eq=False)
class _Job:
    """What a thread was asked to do.

    Attributes:
        action: What to do.
        after: What has to be done before.
        ticket: Tells when it is done.
        cleanup: What to do then in any case.
        rank: How urgent it is; lower is more urgent.
        number: Which of all jobs of its thread it is.
    """

    action: Callable[[], None]
    after: Sequence[Ticket]
    ticket: ThreadTicket
    cleanup: Callable[[], None]
    rank: int = 0
    number: int = 0

    @property
    def can_be_done(self) -> bool:
        """Whether nothing has to be waited for."""
        return all(ticket.done for ticket in self.after)


class _JobThread(ABC):
    """A thread that does jobs. The first one starts it.

    Args:
        name: Of the thread.
        on_start: What the thread does first.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        self._name = name
        self._on_start = on_start or _nothing
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    @abstractmethod
    def _next(self) -> _Job | None:
        """Wait for the next job; None if the thread is to end."""

    def _run(self) -> None:
        self._on_start()
        while (job := self._next()) is not None:
            ticket = job.ticket
            _do(job)
            del job  # who waits for the ticket finds free what the job held on to
            ticket.finish()
            del ticket


class CopyThread(_JobThread):
    """A thread that does what it was asked to, in that order: one copy engine."""

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        super().__init__(name, on_start)
        self._jobs: queue.SimpleQueue[_Job | None]
        self._jobs = queue.SimpleQueue()
        self._last: ThreadTicket | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._last is not None and not self._last.done

    def submit(self, action: Callable[[], None], after: Sequence[Ticket] = ()) -> ThreadTicket:
        """Do something after what was submitted before it, and after these tickets; if one of them failed, so does it.

        Args:
            action: What to do.
            after: What has to be done before.
        """
        self._start()
        ticket = self._last = ThreadTicket()
        self._jobs.put(_Job(action, after, ticket, _nothing))
        return ticket

    def drain(self) -> None:
        """Block until every job is done."""
        if self._thread is not None:
            self.submit(_nothing).join()

    def close(self) -> None:
        """Do what is left and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    @override
    def _next(self) -> _Job | None:
        return self._jobs.get()


class Worker(_JobThread):
    """A thread that does what is most urgent among what can be done.

    Of several jobs whose predecessors are done, the one with the lowest rank comes first, and of equal ranks the one
    that was given first. If none can be done yet, the predecessors of the one that was given first are waited for:
    copies end in the order in which they begin, and a job that waits for another one was given after that.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        super().__init__(name, on_start)
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._given = 0
        self._is_working = False
        self._closing = False

    def submit(
        self,
        action: Callable[[], None],
        after: Sequence[Ticket] = (),
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> ThreadTicket:
        """Do something after these tickets; if one of them failed, so does it.

        Args:
            action: What to do.
            after: What has to be done before.
            cleanup: What to do then in any case.
            rank: How urgent it is; lower is more urgent.
        """
        self._start()
        ticket = ThreadTicket()
        with self._changed:
            self._given += 1
            job = _Job(action, after, ticket, cleanup or _nothing, rank, self._given)
            insort(self._waiting, job, key=lambda waiting: (waiting.rank, waiting.number))
            self._changed.notify_all()
        return ticket

    def drain(self) -> None:
        """Block until every job is done."""
        if threading.current_thread() is self._thread:  # a job that compiles: it cannot wait for itself
            return
        with self._changed:
            while self._waiting or self._is_working:
                self._changed.wait()

    def close(self) -> None:
        """Do what is left and end the thread."""
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
            given_first = min(self._waiting, key=lambda waiting: waiting.number)
        for ticket in given_first.after:
            with contextlib.suppress(BaseException):  # the job fails with it, and tells who waits for that
                ticket.join()
        with self._changed:
            return self._take(self._most_urgent() or given_first)

    def _most_urgent(self) -> _Job | None:
        """Of those that can be done; None if there is none."""
        return next((waiting for waiting in self._waiting if waiting.can_be_done), None)

    def _take(self, chosen: _Job) -> _Job:
        self._waiting.remove(chosen)
        self._is_working = True
        return chosen


def _do(job: _Job) -> None:
    try:
        for earlier in job.after:
            earlier.join()
        with job.ticket.at_work():
            job.action()
    except BaseException as error:
        job.ticket.error = error
    job.cleanup()
    del job  # the traceback of an error keeps this frame


def _nothing() -> None:
    pass


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; not `target.copy_`, which in a second thread would start a second pool of OpenMP threads."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
