"""Threads that copy host memory, in the order in which they were asked to."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.transfer import Ticket


class ThreadTicket(Ticket):
    """Done when a thread says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    @override
    def join(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lane:
    """One copy engine: a thread that copies in the order it was asked to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], ThreadTicket] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ThreadTicket | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._last is not None and not self._last.done.is_set()

    def submit(self, job: Callable[[], None]) -> ThreadTicket:
        """Run a job after those submitted before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ticket = self._last = ThreadTicket()
        self._jobs.put((job, ticket))
        return ticket

    def drain(self) -> None:
        """Block until every job is done."""
        if self._thread is not None:
            self.submit(lambda: None).join()

    def close(self) -> None:
        """Do what is left and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, ticket = entry
            try:
                job()
            except BaseException as error:
                ticket.error = error
            ticket.done.set()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; not `target.copy_`, which in a second thread would start a second pool of OpenMP threads."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
