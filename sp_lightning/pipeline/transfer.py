"""Copies between host and device: streams, events, pinned memory; one backend per kind of device.

Nothing here knows what is copied or when: the pipeline decides, the backend keeps the order right.

[Note: ordering of copies]
A copy to the device starts after all work that was given to the device before it (the slot's last reader is among
it), and computing waits for the copy's ticket before it reads the slot. A copy to the host starts after all work
given before it (the gradients are among it). Those are the only two orders the engine needs, and both are kept on
the device: `upload`, `download` and `wait` never make the host wait. `synchronize` does; whoever calls it counts it.

The emulated device keeps the same two orders with threads, so that a missing wait or a slot given away too early
shows as a wrong number on a laptop, not only on a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

_POISON = 0xFF  # every float made of these bytes is NaN, every signed integer -1


class Ticket(ABC):
    """One copy on its way."""

    @abstractmethod
    def join(self) -> None:
        """Block the calling thread until the copy is done; for worker threads."""


class Backend(ABC):
    """What the engine asks of a kind of device.

    Args:
        device: The device to compute on.
        poison: Fill memory that holds nothing with NaN, so that a read of it cannot go unseen.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self.device = device
        self.poison = poison

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory as bytes."""
        # the sanity check comes first, in inference mode, and memory made there is of no use to training
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.poison:
                memory.fill_(_POISON)
            return memory

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the device, after everything computed so far."""

    @abstractmethod
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the host, after everything computed so far."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Make what is computed from now on wait for the copy; the host goes on."""

    def synchronize(self, ticket: Ticket) -> None:
        """Make the host wait for the copy."""
        ticket.join()

    def invalidate(self, memory: Tensor) -> None:
        """Memory that nobody may read any more; poisoned when debugging."""
        if self.poison:
            memory.fill_(_POISON)

    def pin(self, memory: Tensor) -> bool:
        """Page-lock host memory in place; False if that is not possible or not needed."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""
        raise NotImplementedError(f"{type(self).__name__} pins nothing.")

    def total_memory(self) -> int | None:
        """Bytes of device memory, if that is known."""
        return None

    @abstractmethod
    def drain(self) -> None:
        """Block until no copy is on its way."""

    def close(self) -> None:
        """Give back threads and streams."""
        self.drain()


# --------------------------------------------------------------------------------------------------------------------
# Real devices
# --------------------------------------------------------------------------------------------------------------------


class _StreamTicket(Ticket):
    def __init__(self, event: Any) -> None:
        self.event = event

    def join(self) -> None:
        self.event.synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class AcceleratorBackend(Backend):
    """CUDA and whatever else torch gives streams and events to."""

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__(device, poison)
        self._api: Any = torch.get_device_module(device)
        if not hasattr(self._api, "Stream"):
            raise ValueError(
                f"`device={device}`: torch has no streams for {device.type!r}, so nothing can be streamed."
            )
        with self._api.device(device):
            self._up = self._api.Stream()
            self._down = self._api.Stream()

    @override
    def upload(self, target: Tensor, source: Tensor) -> Ticket:
        return self._copy(self._up, target, source)

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        return self._copy(self._down, target, source)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> Ticket:
        stream.wait_stream(self._api.current_stream(self.device))
        with self._api.stream(stream):
            target.copy_(source, non_blocking=True)
            event = self._api.Event()
            event.record(stream)
        return _StreamTicket(event)

    @override
    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _StreamTicket)
        self._api.current_stream(self.device).wait_event(ticket.event)

    @override
    def pin(self, memory: Tensor) -> bool:
        # torch's own pinned allocator rounds up to powers of two, up to twice the memory (pytorch#150517)
        if self.device.type != "cuda" or memory.nbytes == 0:
            return False
        status = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        return int(status) == 0

    @override
    def unpin(self, memory: Tensor) -> None:
        _cudart().cudaHostUnregister(memory.data_ptr())

    @override
    def total_memory(self) -> int | None:
        if hasattr(self._api, "mem_get_info"):
            return int(self._api.mem_get_info(self.device)[1])
        return None

    @override
    def drain(self) -> None:
        self._up.synchronize()
        self._down.synchronize()


# --------------------------------------------------------------------------------------------------------------------
# The CPU as a device, and the emulated device of the tests
# --------------------------------------------------------------------------------------------------------------------


class _ThreadTicket(Ticket):
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def join(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class _Lane:
    """One copy engine: a thread that copies in the order it was asked to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], _ThreadTicket] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> _ThreadTicket:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ticket = _ThreadTicket()
        self._jobs.put((job, ticket))
        return ticket

    def drain(self) -> None:
        if self._thread is not None:
            self.submit(lambda: None).join()

    def close(self) -> None:
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


class HostBackend(Backend):
    """The CPU as the device: "device" memory is other host memory, and copies run on threads.

    Training with `accelerator="cpu"` uses it as it is. With `max_delay` and `poison` it is the emulated device that
    the tests use as a race detector: copies take a random time, and memory that holds nothing is full of NaN.

    Args:
        device: The CPU.
        poison: Fill memory that holds nothing with NaN.
        max_delay: Longest random delay before a copy, in seconds.
        seed: Seed of the delays.
    """

    def __init__(
        self, device: torch.device | None = None, poison: bool = False, max_delay: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(device or torch.device("cpu"), poison)
        self._max_delay = max_delay
        self._random = random.Random(seed)
        self._up = _Lane("superpipeline-upload")
        self._down = _Lane("superpipeline-download")

    @override
    def upload(self, target: Tensor, source: Tensor) -> Ticket:
        return self._copy(self._up, target, source)

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        return self._copy(self._down, target, source)

    def _copy(self, lane: _Lane, target: Tensor, source: Tensor) -> Ticket:
        self.invalidate(target)
        delay = self._random.uniform(0, self._max_delay) if self._max_delay else 0.0

        def job() -> None:
            if delay:
                time.sleep(delay)
            # not `target.copy_`: in a second thread that would start a second pool of OpenMP threads
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)

        return lane.submit(job)

    @override
    def wait(self, ticket: Ticket) -> None:
        # this thread *is* the device's compute queue, so the order on the device is kept by waiting here
        ticket.join()

    @override
    def drain(self) -> None:
        self._up.drain()
        self._down.drain()

    @override
    def close(self) -> None:
        self._up.close()
        self._down.close()


def make_backend(device: torch.device, debug: bool) -> Backend:
    """The backend for a device; `debug` adds poison, and delays where copies run on threads."""
    if device.type == "cpu":
        return HostBackend(device, poison=debug, max_delay=0.002 if debug else 0.0)
    return AcceleratorBackend(device, poison=debug)
