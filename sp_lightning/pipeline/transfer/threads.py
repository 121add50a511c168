"""Threads that work on host memory, in the order in which they were asked to."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

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

    def wait(self) -> None:
        """Block until it is done, well or not."""
        if not self._is_done:
            with self._under_way:
                pass

    @override
    def join(self) -> None:
        self.wait()
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


_Entry = tuple[Callable[[], None], Sequence[Ticket], Callable[[], None], ThreadTicket]


class _RankedEntry(NamedTuple):
    rank: int
    number: int
    entry: _Entry

    @property
    def can_be_done(self) -> bool:
        return all(ticket.done for ticket in self.entry[1])


class Lane:
    """A thread that does what it was asked to, in that order: one copy engine.

    Args:
        name: Of the thread.
        on_start: What the thread does first.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        self._name = name
        self._on_start = on_start or _nothing
        self._jobs: queue.SimpleQueue[_Entry | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ThreadTicket | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._last is not None and not self._last.done

    def submit(
        self, job: Callable[[], None], after: Sequence[Ticket] = (), cleanup: Callable[[], None] | None = None
    ) -> ThreadTicket:
        """Run a job after those submitted before it, and after these tickets; if one of them failed, so does it.

        Args:
            job: What to do.
            after: What has to be done before.
            cleanup: What to do then in any case.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ticket = self._last = ThreadTicket()
        self._jobs.put((job, after, cleanup or _nothing, ticket))
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

    def _run(self) -> None:
        self._on_start()
        while (entry := self._jobs.get()) is not None:
            ticket = entry[-1]
            _do(entry)
            del entry  # who waits for the ticket finds free what the job held on to
            ticket.finish()
            del ticket


class Worker:
    """A thread that does what is most urgent among what can be done.

    Of several jobs whose predecessors are done, the one with the lowest rank comes first, and of equal ranks the one
    that was given first. If none can be done yet, the predecessors of the one that was given first are waited for:
    copies end in the order in which they begin, and a job that waits for another one was given after that.

    Args:
        name: Of the thread.
        on_start: What the thread does first.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        self._name = name
        self._on_start = on_start or _nothing
        self._changed = threading.Condition()
        self._waiting: list[_RankedEntry] = []
        self._given = 0
        self._unfinished: set[ThreadTicket] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(
        self,
        job: Callable[[], None],
        after: Sequence[Ticket] = (),
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> ThreadTicket:
        """Run a job after these tickets; if one of them failed, so does it.

        Args:
            job: What to do.
            after: What has to be done before.
            cleanup: What to do then in any case.
            rank: How urgent it is; lower is more urgent.
        """
        if self._thread is None:
            self._closing = False
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ticket = ThreadTicket()
        with self._changed:
            self._unfinished.add(ticket)
            self._given += 1
            entry = _RankedEntry(rank, self._given, (job, after, cleanup or _nothing, ticket))
            insort(self._waiting, entry, key=lambda waiting: waiting[:2])
            self._changed.notify()
        return ticket

    def drain(self) -> None:
        """Block until every job is done."""
        if threading.current_thread() is self._thread:  # a job that compiles: it cannot wait for itself
            return
        with self._changed:
            unfinished = list(self._unfinished)
        for ticket in unfinished:
            ticket.wait()

    def close(self) -> None:
        """Do what is left and end the thread."""
        if self._thread is not None:
            with self._changed:
                self._closing = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def _next(self) -> _Entry | None:
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return None
            chosen = self._most_urgent()
            if chosen is not None:
                return self._take(chosen)
            given_first = min(self._waiting, key=lambda waiting: waiting.number)
        for ticket in given_first.entry[1]:
            with contextlib.suppress(BaseException):  # the job fails with it, and tells who waits for that
                ticket.join()
        with self._changed:
            return self._take(self._most_urgent() or given_first)

    def _most_urgent(self) -> _RankedEntry | None:
        """Of those that can be done; None if there is none."""
        return next((waiting for waiting in self._waiting if waiting.can_be_done), None)

    def _take(self, chosen: _RankedEntry) -> _Entry:
        self._waiting.remove(chosen)
        return chosen.entry

    def _run(self) -> None:
        self._on_start()
        while (entry := self._next()) is not None:
            ticket = entry[-1]
            _do(entry)
            del entry  # who waits for the ticket finds free what the job held on to
            with self._changed:
                self._unfinished.discard(ticket)
            ticket.finish()
            del ticket


def _do(entry: _Entry) -> None:
    job, after, cleanup, ticket = entry
    try:
        for earlier in after:
            earlier.join()
        with ticket.at_work():
            job()
    except BaseException as error:
        ticket.error = error
    cleanup()
    del entry, job, after, cleanup  # the traceback of an error keeps this frame


def _nothing() -> None:
    pass


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; not `target.copy_`, which in a second thread would start a second pool of OpenMP threads."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
