"""Backends: accelerators, the CPU as a device (also the tests' emulated device), and the choice of one.

An accelerator is CUDA, or another device for which torch has streams and events.

Copies run on streams of their own, ordered by events. Copies that come after work on the host have their own stream: a
copy that was requested later may be issued before them, and would make them wait for the computing before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.host_memory import usable_cores
from sp_lightning.pipeline.lanes.at_work import use_threads
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, UPDATE_KINDS, Backend, DeviceMemory
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind, Origin, Ticket, Worker
from sp_lightning.pipeline.torch_private import use_expandable_segments


class _StreamTicket(Ticket):
    """A copy that is done once an event on a copy stream has completed.

    The event at its `begin` exists if copies are timed. Events are queried on their own device: a query while another
    device is current would make a context there.
    """

    def __init__(
        self,
        event: Any,
        begin: Any,
        on_device: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.event = event
        self.begin = begin
        self._on_device = on_device

    @override
    def join(self) -> None:
        with self._on_device():
            self.event.synchronize()

    @property
    @override
    def done(self) -> bool:
        try:
            with self._on_device():
                return bool(self.event.query())
        except RuntimeError:  # the error of an earlier kernel, which `join` raises, too
            return True

    @override
    def interval(self, origin: Origin) -> tuple[float, float]:
        self.join()
        begin = origin.device.elapsed_time(self.begin)
        end = origin.device.elapsed_time(self.event)
        return begin / 1000, end / 1000


# After this many refusals to pin memory, each of which costs time, the backend pins no more memory.
_MOST_REFUSALS = 3
_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS=1 lets no copy run while the GPU computes. Unset it."


# These are assumed until an update on the device was recorded: the share of the memory's bandwidth that plain kernels
# reach, and the time that each of them waits next to kernels that compute.
REACHED_OF_MEMORY = 0.8
KERNEL_SECONDS = 1e-5


class AcceleratorBackend(Backend):
    """CUDA, and any other type of device for which torch has streams and events."""

    kernel_seconds = KERNEL_SECONDS

    def __init__(self, device: torch.device, poison: bool = False, threads: int | None = None) -> None:
        super().__init__(device, poison, Worker("superpipeline-host", self._begin_work))
        self._threads = threads
        self._former_peak = 0
        self._api: Any = torch.get_device_module(device)
        if not hasattr(self._api, "Stream"):
            raise ValueError(f"`device={device}`: torch has no streams for {device.type!r}, so nothing can stream.")
        self._on_device = partial(self._api.device, device)
        with self._on_device():
            self._up = self._api.Stream()
            self._up_behind_work = self._api.Stream()
            self._down = self._api.Stream()
            # Updates on the device wait for memory, and would hold up other copies on their streams. Without priority,
            # each of their small kernels would wait behind the large ones that compute.
            self._update_streams = {
                kind: self._api.Stream(priority=-1 if kind is Kind.VISIT else 0) for kind in UPDATE_KINDS
            }
        self.stream_of_step = self.stream()
        self.pins = device.type == "cuda"
        self.memory_rate = self._memory_rate()
        self._refusals = 0  # how often the system has refused to pin memory
        if self.pins:
            use_expandable_segments(self._up)
            if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                warnings.warn(_ONE_QUEUE, stacklevel=2)

    def _memory_rate(self) -> float:
        """Return the bytes of the device's memory that kernels read and write in a second; infinite if unknown."""
        if self.device.type != "cuda":
            return math.inf
        facts = self._api.get_device_properties(self.device)
        kilohertz = getattr(facts, "memory_clock_rate", 0)
        bits = getattr(facts, "memory_bus_width", 0)
        # Each of the two edges of the clock moves data.
        return REACHED_OF_MEMORY * 2 * 1e3 * kilohertz * bits / 8 or math.inf

    def _begin_work(self) -> None:
        # Otherwise waiting for an event would create a context on device 0.
        self._api.set_device(self.device)
        use_threads(self._threads)

    @override
    def stream(self) -> Any:
        return self._api.current_stream(self.device)

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        computing = self.stream()
        if after is None or after.done:
            if after is not None:
                after.join()  # raises if the job failed: there is nothing to copy
            self._up.wait_stream(computing)
            return self._copy(self._up, target, source)
        computed = computing.record_event()
        earlier = [after]
        # The device itself can wait for an update on it.
        if isinstance(after, DeferredTicket) and after.job.done:
            self._up_behind_work.wait_event(_event_of(after))
            earlier = []

        def issue() -> None:
            self._up_behind_work.wait_event(computed)
            deferred.ticket = self._copy(self._up_behind_work, target, source)

        deferred = DeferredTicket(Job(issue, earlier, rank=BEFORE_OTHER_WORK))
        self.issue_when_ready(deferred.job)
        return deferred

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        self._down.wait_stream(self.stream())
        return self._copy(self._down, target, source)

    @override
    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        stream = self._update_streams[kind]
        for earlier in job.after:
            stream.wait_event(_event_of(earlier))
        try:
            return self._issue(stream, job.action)
        finally:
            job.finish()  # or it might keep device memory alive, in a reference cycle

    @override
    def computed(self) -> Ticket:
        return _StreamTicket(self.stream().record_event(), None, self._on_device)

    @override
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy. If the memory is not pinned, CUDA copies step by step, and the thread waits meanwhile."""
        target.copy_(source, non_blocking=True)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> Ticket:
        return self._issue(stream, partial(self.copy, target, source))

    def _issue(self, stream: Any, job: Callable[[], None]) -> Ticket:
        # The host's thread sleeps until a copy has come down. Otherwise it would spin next to the thread that launches
        # kernels.
        updates = self._update_streams
        to_host = (self._down, updates[Kind.STATE_DOWN], updates[Kind.LATE_GRADIENTS])
        flags = {"blocking": stream in to_host} if self.device.type == "cuda" else {}
        begin = self._api.Event(enable_timing=True) if self.timed else None
        ticket = _StreamTicket(self._api.Event(enable_timing=self.timed, **flags), begin, self._on_device)
        with self._api.stream(stream):
            if begin is not None:
                begin.record(stream)
            job()
            ticket.event.record(stream)
        return ticket

    @override
    def wait(self, ticket: Ticket) -> None:
        self.stream().wait_event(_event_of(ticket))

    @override
    def mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self.stream())
        return event

    @override
    def seconds(self, begin: Any, end: Any) -> float:
        with self._on_device():
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @override
    def origin(self) -> Origin:
        # The event completes now, and not when the device gets to it.
        self._api.synchronize(self.device)
        origin = super().origin()
        with self._on_device():
            origin.device.synchronize()  # other lanes may be done before computing gets to it
        return origin

    @override
    def pin(self, memory: Tensor) -> bool:
        # torch's allocator of pinned memory rounds up to a power of two: up to twice the memory (pytorch#150517)
        if self._refusals == _MOST_REFUSALS:
            return False
        with self._on_device():
            done = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
            if not done:
                self._refusals += 1
                self._clear_error()
        return done

    def _clear_error(self) -> None:
        """Consume the error that a failed call leaves behind: otherwise the next kernel launch would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    @override
    def unpin(self, memory: Tensor) -> None:
        with self._on_device():
            # This fails if an interrupt came before the memory was pinned.
            if int(_cudart().cudaHostUnregister(memory.data_ptr())) != 0:
                self._clear_error()

    @override
    def memory(self) -> DeviceMemory:
        free, total = self._api.mem_get_info(self.device)
        # The user may have limited the process with `torch.cuda.set_per_process_memory_fraction`.
        allowed = getattr(self._api, "get_per_process_memory_fraction", lambda device: 1.0)
        total = int(allowed(self.device) * total)
        allocated = self._api.memory_allocated(self.device)
        peak = self._api.max_memory_allocated(self.device)
        cached = self._api.memory_reserved(self.device) - allocated
        retries = self._api.memory_stats(self.device).get("num_alloc_retries", 0)
        free = min(free + cached, max(0, total - allocated))
        return DeviceMemory(total, free, allocated, peak, max(self._former_peak, peak), retries)

    @override
    def count_peak_anew(self) -> DeviceMemory:
        before = self.memory()
        self._former_peak = before.peak_so_far
        self._api.reset_peak_memory_stats(self.device)
        return before

    @override
    def drain(self) -> None:
        for worker in self.workers:
            worker.drain()
        for stream in (self._up, self._up_behind_work, self._down, *self._update_streams.values()):
            stream.synchronize()


def _event_of(ticket: Ticket) -> Any:
    issued = ticket.issued()
    assert isinstance(issued, _StreamTicket)
    return issued.event


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class HostBackend(Backend):
    """The CPU as the device: "device" memory is other host memory, and copies run on threads.

    Training with `accelerator="cpu"` uses it as it is. With `max_delay` and `poison` it is the emulated device that
    the tests use as a race detector: each copy and each job on the host is delayed at random, by at most `max_delay`
    seconds, and unused memory is full of NaN.
    """

    def __init__(
        self,
        poison: bool = False,
        max_delay: float = 0.0,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        worker = partial(Worker, max_delay=max_delay, seed=seed)
        host = worker("superpipeline-host", partial(use_threads, threads))
        super().__init__(torch.device("cpu"), poison, host)
        self._up = worker("superpipeline-upload")
        self._down = worker("superpipeline-download")
        self._update_lanes = {kind: worker(f"superpipeline-{kind.label}") for kind in UPDATE_KINDS}
        self._copying = (self._up, self._down, *self._update_lanes.values())

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        self.invalidate(target)
        copy = partial(copy_memory, target, source)
        if after is None:
            return self._up.submit(Job(copy))
        return self._host.submit(Job(copy, [after], rank=BEFORE_OTHER_WORK))

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        self.invalidate(target)
        return self._down.submit(Job(partial(copy_memory, target, source)))

    @override
    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        return self._update_lanes[kind].submit(job)

    @override
    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_memory(target, source)

    @override
    def wait(self, ticket: Ticket) -> None:
        # this thread *is* the device's compute stream, so blocking it keeps the order on the device
        ticket.join()

    @override
    def drain(self) -> None:
        for worker in (*self.workers, *self._copying):
            worker.drain()

    @override
    def close(self) -> None:
        super().close()
        for worker in self._copying:
            worker.close()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; `Tensor.copy_` would start a second pool of OpenMP threads in a second thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def full_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; by default the current accelerator if torch has streams for it, or the CPU."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        if not hasattr(torch.get_device_module(device), "Stream"):
            device = "cpu"
    try:
        return torch.empty(0, device=device).device  # a tensor's device has an index
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        # Torch's message may list all kinds of devices that it has ever known.
        reason = "It knows no such device." if "Expected one of" in str(error) else str(error).partition("\n")[0]
        raise ValueError(f"`device={str(device)!r}` is not a device that this torch can use. {reason}") from error


def make_backend(
    device: torch.device,
    host_threads: int | Literal["auto"],
    processes: int,
    debug: bool,
) -> Backend:
    """Make the backend for a device, on a machine that this number of `processes` share.

    `debug` poisons unused memory, and delays copies on the emulated device.
    """
    threads = _threads(device, processes) if host_threads == "auto" else host_threads
    if device.type == "cpu":
        return HostBackend(poison=debug, max_delay=0.002 if debug else 0.0, threads=threads)
    return AcceleratorBackend(device, poison=debug, threads=threads)


# One core in four, and at least one, is left to the training loop and data loaders.
_SHARE_OF_LOOP = 4


def _threads(device: torch.device, processes: int) -> int | None:
    """Choose how many threads share an operation on host memory, while another one launches kernels; None for torch's.

    On the CPU, sums have to be those of plain training. `torchrun` uses the variable that users set to grant one thread
    to each of its processes.
    """
    is_set_by_user = "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if device.type == "cpu" or is_set_by_user:
        return None
    cores = max(1, usable_cores() // processes)
    return max(1, cores - max(1, cores // _SHARE_OF_LOOP))
