"""Parts of the engine, made one by one, so that a test can look at a single one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline import Backend, HostBackend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket, Worker


class DoneTicket(Ticket):
    """A copy that has landed, or failed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    @override
    def join(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    @override
    def done(self) -> bool:
        return True


class PendingTicket(Job):
    """Work on the host that is done when a test says so."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    @override
    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        super().finish()


class RecordingBackend(Backend):
    """Copies and works at once, in the calling thread, and notes what is pinned."""

    def __init__(self, pins: bool = False) -> None:
        super().__init__(torch.device("cpu"), poison=True, host=Worker("unused"))
        self._failing: dict[str, BaseException] = {}
        self.pins = pins
        self.pinned: set[int] = set()

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        return self._copy("upload", target, source)

    @override
    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        job.action()
        return DoneTicket()

    @override
    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    @override
    def work(self, job: Job) -> Ticket:
        try:
            for ticket in job.after:
                ticket.join()
            job.action()
        except BaseException as error:
            return DoneTicket(error)
        finally:
            job.cleanup()
        return DoneTicket()

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        return self._copy("download", target, source)

    def _copy(self, what: str, target: Tensor, source: Tensor) -> Ticket:
        target.copy_(source)
        return DoneTicket(self._failing.pop(what, None))

    @override
    def wait(self, ticket: Ticket) -> None:
        ticket.join()

    def fail_next(self, what: str, error: BaseException) -> None:
        """Let the next copy in one direction fail."""
        self._failing[what] = error

    @override
    def drain(self) -> None: ...

    @override
    def pin(self, memory: Tensor) -> bool:
        self.pinned.add(memory.data_ptr())
        return True

    @override
    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


@contextmanager
def host_backend(**options: Any) -> Iterator[HostBackend]:
    """A backend with threads, closed at the end."""
    backend = HostBackend(**options)
    try:
        yield backend
    finally:
        backend.close()


def pretend_a_device(patch: pytest.MonkeyPatch) -> MagicMock:
    """A device that does nothing: 7 MiB of memory, of which 3 are free, and 5 KiB are torch's, 1 of it allocated."""
    api = MagicMock()
    api.mem_get_info.return_value = 3 << 20, 7 << 20
    api.get_per_process_memory_fraction.return_value = 1.0
    api.memory_reserved.return_value = 5 << 10
    api.get_device_properties.return_value = SimpleNamespace(memory_clock_rate=10_000, memory_bus_width=64)
    api.memory_allocated.return_value = api.max_memory_allocated.return_value = 1 << 10
    patch.setattr(torch, "get_device_module", lambda device: api)
    return api
