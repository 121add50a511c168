"""The interface to a kind of device: copies between it and the host, and work on host memory.

accelerator.py implements it. The pipeline decides what is copied and when, and the backend keeps the
order right.

[Note: ordering of copies]
A host-to-device copy starts after all work that was given to the device before it, the slot's last reader included,
and computing waits for the copy's ticket before it reads the slot. A device-to-host copy starts after all work given
before it, the kernels that produce the gradients included. Both orders are kept on the device, so `upload` and
`download` of pinned memory never block the host. A ticket's `join` blocks it until the copy is done; callers count it.

Computing is a single queue: once it has waited for a copy, it need not wait again. A slot may be overwritten as soon as
that queue is past the slot's last reader ([Note: one thread, one stream] in pipeline/__init__.py).

Work on host memory (accumulating gradients, stepping the optimizer) runs on one thread, most urgent first, each job
after the copies that it needs. A host-to-device copy can be told to start after such a job. Then this thread issues
the copy, before any other job, and `wait` blocks the host until then: computing cannot wait for a copy that has no
event yet. The copy holds up no other one meanwhile. So copies to the device need not keep their order: before another
copy into the same memory is asked for, computing has to wait for the earlier one.

An update on the device has lanes of its own (`submit_to_lane`): state goes up, is updated and comes down. The update
waits for memory in between, and would hold up other copies. Gradients that have waited on the device for their unit's
update have a lane of their own, too.

The emulated device keeps the same orders with threads, so that a missing wait, or a slot given away too early, shows
as a wrong number on a laptop, not only on a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from sp_lightning.pipeline.lanes.lanes import Job, Kind, Origin, Recording, Span, Ticket, Worker
from sp_lightning.pipeline.torch_private import profiler_is_on

_LEAST_STALL = 20e-6  # seconds; the query alone takes less when there is nothing to wait for
_POISON = 0xFF  # every float made of these bytes is NaN, every signed integer -1
# The rank of a copy that comes after a job; the rank of a step is its unit's place in the forward.
BEFORE_OTHER_WORK = -1
UPDATE_KINDS = (Kind.STATE_UP, Kind.VISIT, Kind.STATE_DOWN, Kind.LATE_GRADIENTS)
"""The kinds of work for updates of units, each with a lane of its own next to computing, as it waits for memory."""


_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # this comes with expandable segments
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the device has no memory left.

    The driver and libraries take memory of their own, and have their own messages for a lack of it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes."""

    total: int  # bytes that this process may have
    free: int  # bytes that can be allocated now
    allocated: int  # bytes that are allocated now
    peak: int  # the peak of allocated bytes since it was last reset
    peak_so_far: int  # the peak of allocated bytes at any time
    retries: int  # how often the allocator ran out of memory, freed its cache and tried again


class Backend(ABC):
    """A device as the engine sees it: computing, copies in both directions and work on the host, in parallel."""

    timed = False  # whether new tickets record when they begin and end
    pins = False  # whether host memory that is sent is pinned
    # For the kernels of updates: the bytes of device memory that they move in a second, and how long each waits.
    memory_rate = math.inf
    kernel_seconds = 0.0
    # The stream that computes in this step and its backward; None if the device has none.
    stream_of_step: Any = None

    def __init__(self, device: torch.device, poison: bool, host: Worker) -> None:
        self.device = device
        self.poison = poison  # whether unused memory is filled with NaN, so that a read is noticed
        self.trace = Trace(self)
        self._host = host  # the thread for work on host memory
        self.workers = [host]  # this one, and others for such work

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate device memory, as bytes."""
        # Lightning's sanity check comes first, in inference mode, and training cannot use tensors made there.
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.invalidate(memory)
            return memory

    def stream(self) -> Any:
        """Return the stream that computes now; None if the device has none."""
        return None

    def check_stream(self, what: str) -> None:
        """Raise if another stream computes than when the step began ([Note: one thread, one stream])."""
        stream = self.stream()
        if stream != self.stream_of_step:
            # Memory that the other stream reads may be given to others now.
            self.stream_of_step.wait_stream(stream)
            raise RuntimeError(
                f"{what} is computed on another stream than the one that was current when the "
                "step began. Superpipeline overwrites weights and gradients on the GPU as soon "
                "as that first stream has used them. Compute all of a step on one stream."
            )

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Copy bytes to the device, after everything computed so far and, if given, after a job on the host."""

    @abstractmethod
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the host, after everything computed so far."""

    def work(self, job: Job) -> Ticket:
        """Run a job on the thread for work on host memory."""
        return self._host.submit(job)

    def add_worker(self, purpose: str) -> Worker:
        """Return another thread for work on host memory."""
        worker = self._host.like(purpose)
        self.workers.append(worker)
        return worker

    @abstractmethod
    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        """Run a job on the device in parallel to computing, in the lane for its kind (one of `UPDATE_KINDS`).

        It comes after earlier jobs of the lane, and after the job's tickets, which are the device's.
        """

    def computed(self) -> Ticket:
        """Return a ticket for everything computed so far, so that other lanes can come after it."""
        ticket = Job()
        ticket.finish()
        return ticket

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes between host and device, in the lane that calls this."""

    def issue_when_ready(self, job: Job) -> None:
        """Run a job that issues work to the device, when it is ready: now, or on the thread for work on host memory."""
        if job.is_ready:
            job.run()
        else:
            self._host.submit(job)

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Make everything computed from now on wait for the copy; see [Note: ordering of copies]."""

    def mark(self) -> Any:
        """Mark the moment at which the device will have computed everything given to it so far."""
        return perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks; blocks the host until the second is reached."""
        return float(end - begin)

    def origin(self) -> Origin:
        """Take the present moment as the origin of a recording."""
        return Origin(self.mark(), perf_counter())

    @abstractmethod
    def drain(self) -> None:
        """Block until no copy is in flight and no work is left."""

    def invalidate(self, memory: Tensor) -> None:
        """Fill memory that must not be read with poison, if `poison` is on."""
        if self.poison:
            memory.fill_(_POISON)

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory in place; return False if that is impossible."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""
        raise NotImplementedError(f"{type(self).__name__} pins nothing.")

    def memory(self) -> DeviceMemory | None:
        """Return how much memory the device has, or None if unknown."""
        return None

    def count_peak_anew(self) -> DeviceMemory | None:
        """Reset the peak of allocated memory; return the memory as it was before."""
        return self.memory()

    def close(self) -> None:
        """Finish all work, and release the resources of the backend."""
        self.drain()
        for worker in self.workers:
            worker.close()


class _TraceEntry(NamedTuple):
    kind: Kind
    name: str
    nbytes: int
    ticket: Ticket | None
    begin: Any = None
    end: Any = None


class _Log:
    """The entries of one recording."""

    def __init__(self) -> None:
        self.entries: list[_TraceEntry] = []
        self.steps: list[Any] = []  # the mark at the begin of each step


class Trace:
    """A log of the work that a backend is given, and of the unit that it is for.

    It is kept during a recording. While torch's profiler is on, all work is a range there as well, such as
    "superpipeline: load of blocks.4". Otherwise a call costs next to nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_on = False  # whether a recording or the profiler is on
        self._logs: list[_Log] = []  # the logs of recordings, which may overlap
        self._computing: _TraceEntry  # the entry of the unit that is computing now
        # The range of that unit in torch's profile; None if no unit computes.
        self._range: record_function | None = None

    def upload(
        self,
        kind: Kind,
        name: str,
        target: Tensor,
        source: Tensor,
        after: Ticket | None = None,
    ) -> Ticket:
        """Ask for a copy to the device."""
        return self._request(kind, name, source.nbytes, self._backend.upload, target, source, after)

    def download(self, kind: Kind, name: str, target: Tensor, source: Tensor) -> Ticket:
        """Ask for a copy to the host."""
        return self._request(kind, name, source.nbytes, self._backend.download, target, source)

    def submit_to_lane(self, kind: Kind, name: str, job: Job) -> Ticket:
        """Ask for work in parallel to computing, for the update of a unit."""
        return self._request(kind, name, job.nbytes, self._backend.submit_to_lane, kind, job)

    def _request(self, kind: Kind, name: str, nbytes: int, ask: Callable[..., Ticket], *args: Any) -> Ticket:
        if not self._is_on:
            return ask(*args)
        with _range(kind.label, name):
            ticket = ask(*args)
        self._note(_TraceEntry(kind, name, nbytes, ticket))
        return ticket

    def work(self, kind: Kind, name: str, job: Job, submit: Callable[[Job], Ticket] | None = None) -> Ticket:
        """Ask for a job on the thread for work on host memory, or elsewhere; its range is where it runs."""
        submit = submit or self._backend.work
        if not self._is_on:
            return submit(job)
        job.action = _range(kind.label, name)(job.action)
        ticket = submit(job)
        self._note(_TraceEntry(kind, name, job.nbytes, ticket))
        return ticket

    def wait(self, ticket: Ticket, what: str) -> None:
        """Make computing wait for a ticket, and note how long it waits."""
        if self._logs:
            self._stall(partial(self._backend.wait, ticket), what)
        else:
            self._backend.wait(ticket)

    def join(self, job: Ticket, what: str) -> None:
        """Make the host wait for a job, and note how long the device is idle because of that."""
        if self._logs and not job.done:
            self._stall(job.join, what)
        else:
            job.join()

    def _stall(self, wait: Callable[[], None], what: str) -> None:
        begin = self._backend.mark()
        wait()
        self._note(_TraceEntry(Kind.STALL, what, 0, None, begin, self._backend.mark()))

    def _note(self, entry: _TraceEntry) -> None:
        for log in self._logs:
            log.entries.append(entry)

    def begin_computing(self, kind: Kind, name: str, is_recomputed: bool = False) -> None:
        """Note that a unit begins to compute, and that the one before it is done."""
        if self._is_on:
            self.end_computing()
            self._range = _range("recompute" if is_recomputed else kind.label, name)
            self._range.__enter__()  # type: ignore[no-untyped-call]
            self._computing = _TraceEntry(kind, name, 0, None, self._backend.mark())

    def end_computing(self) -> None:
        """Note that the unit that was computing is done."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._note(self._computing._replace(end=self._backend.mark()))
            self._range = None

    def mark_step(self) -> None:
        """Note that a step begins, on which stream, and whether it is profiled, once for the whole step."""
        self._backend.stream_of_step = self._backend.stream()
        self._is_on = bool(self._logs) or profiler_is_on()
        for log in self._logs:
            log.steps.append(self._backend.mark())

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the work in this scope; at its end the host waits for the device once.

        Recordings may overlap: a planner's and a timeline's do not know of each other.
        """
        origin = self._backend.origin()
        log = _Log()
        recording = Recording()
        self._logs.append(log)
        self._is_on = self._backend.timed = True
        try:
            yield recording
        finally:
            self.end_computing()
            marks = [*log.steps, self._backend.mark()]
            try:
                # Copies that come after a job are issued only now, and have to be timed, too.
                self._backend.drain()
            finally:
                self._logs.remove(log)
                self._backend.timed = bool(self._logs)
            spans = filter(None, (self._span(entry, origin) for entry in log.entries))
            recording.spans = sorted(spans, key=attrgetter("begin"))
            moments = [self._backend.seconds(origin.device, mark) for mark in marks]
            recording.steps = list(pairwise(moments))

    def _span(self, entry: _TraceEntry, origin: Origin) -> Span | None:
        if entry.ticket is not None:
            begin, end = entry.ticket.interval(origin)
        else:
            begin = self._backend.seconds(origin.device, entry.begin)
            end = self._backend.seconds(origin.device, entry.end)
            if entry.kind is Kind.STALL and end - begin < _LEAST_STALL:
                return None
        return Span(entry.kind.lane, entry.kind, entry.name, begin, end, entry.nbytes)


def _range(phase: str, name: str) -> record_function:
    return record_function(f"superpipeline: {phase} of {name}")
