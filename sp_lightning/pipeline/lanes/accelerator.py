"""Accelerators: copies run on streams of their own, ordered by events.

Copies to the device that have to wait for work on the host are issued when that is done, and so not in the order in
which they were asked for. They have streams of their own, of which an idle one is taken: behind a copy that waits for
computing to come so far, they would wait for that, too, although computing may need them first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.cores import ANYWHERE, HostCores
from sp_lightning.pipeline.lanes.lanes import Origin, Ticket
from sp_lightning.pipeline.lanes.threads import CopyThread, Worker, copy_memory
from sp_lightning.pipeline.torch_private import use_expandable_segments

_CHUNK_BYTES = 32 << 20
_STREAMS_BEHIND_WORK = 4  # CUDA has 8 queues by default; streams beyond that would wait for each other again


class _StreamTicket(Ticket):
    """A copy that is done once an event on a copy stream has completed.

    Args:
        event: Recorded on the stream after the copy.
        begin: Recorded before it, if the copy is timed; else None.
        started: For a copy that a thread issues, done once the thread has recorded the event; else None.
    """

    def __init__(self, event: Any, begin: Any, started: Ticket | None = None) -> None:
        self.event = event
        self.begin = begin
        self.started = started

    @override
    def join(self) -> None:
        if self.started is not None:
            self.started.join()
        self.event.synchronize()

    @property
    @override
    def done(self) -> bool:
        if self.started is not None and not self.started.done:
            return False
        try:
            return bool(self.event.query())
        except RuntimeError:  # of an earlier kernel, which `join` raises, too
            return True

    @override
    def interval(self, origin: Origin) -> tuple[float, float] | None:
        if self.begin is None:
            return None
        self.join()
        begin, end = origin.device.elapsed_time(self.begin), origin.device.elapsed_time(self.event)
        return begin / 1000, end / 1000


class AcceleratorBackend(Backend):
    """CUDA, and any other type of device for which torch has streams and events.

    Args:
        device: The device that forward and backward run on.
        poison: Fill unused memory with NaN.
        cores: The cores on which work on host memory runs, and near which host memory is pinned.
    """

    def __init__(self, device: torch.device, poison: bool = False, cores: HostCores = ANYWHERE) -> None:
        super().__init__(device, poison)
        self._cores = cores
        self._peak_before_reset = 0
        self._api: Any = torch.get_device_module(device)
        if not hasattr(self._api, "Stream"):
            raise ValueError(f"`device={device}`: torch has no streams for {device.type!r}, so nothing can stream.")
        with self._api.device(device):
            self._up = self._api.Stream()
            self._up_behind_work = [self._api.Stream() for _ in range(_STREAMS_BEHIND_WORK)]
            self._down = self._api.Stream()
        if device.type == "cuda":
            use_expandable_segments(self._up)
        self._upload_staging = _Staging(self, "superpipeline-staged-upload")
        self._download_staging = _Staging(self, "superpipeline-staged-download")
        self._host = Worker("superpipeline-host", self._begin_work)

    def select_device(self) -> None:
        """Make this device current in a new thread.

        Threads begin on device 0, and waiting for an event there would create a context on it.
        """
        self._api.set_device(self.device)

    def _begin_work(self) -> None:
        self.select_device()
        self._cores.occupy()

    @override
    def gather_free_memory(self) -> None:
        # The caching allocator would cut long-lived memory from a free block that large activations need whole again.
        if hasattr(self._api, "empty_cache"):
            self._api.empty_cache()

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        computing, pinned = self._api.current_stream(self.device), source.is_pinned()
        if after is not None and after.done:
            after.join()  # raises if it failed: there is nothing to copy
        elif after is not None:
            computed = computing.record_event()  # the stream waits for it when the copy is issued, and no sooner
            stream = self._stream_behind_work
            return self._copy_later(self._upload_staging, stream, target, source, pinned, after, computed)
        self._up.wait_stream(computing)
        if pinned and not self._upload_staging.lane.busy:  # else it would overtake copies before it
            return self._copy(self._up, target, source)
        return self._copy_later(self._upload_staging, lambda: self._up, target, source, pinned)

    def _stream_behind_work(self) -> Any:
        """Return an idle stream; if there is none, the one that was taken last: others may be waiting for computing."""
        streams = self._up_behind_work
        stream = next((stream for stream in streams if stream.query()), streams[-1])
        streams.remove(stream)
        streams.append(stream)
        return stream

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        self._down.wait_stream(self._api.current_stream(self.device))
        pinned = target.is_pinned()
        if pinned and not self._download_staging.lane.busy:
            return self._copy(self._down, target, source)
        return self._copy_later(self._download_staging, lambda: self._down, target, source, pinned)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> _StreamTicket:
        begin, event = self._events()
        with self._api.stream(stream):
            if begin is not None:
                begin.record(stream)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return _StreamTicket(event, begin)

    def _events(self) -> tuple[Any, Any]:
        """Make events for a copy's beginning (None unless copies are timed) and its end."""
        if self.timed:
            return self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        return None, self._api.Event()

    def _copy_later(
        self,
        staging: _Staging,
        choose_stream: Callable[[], Any],
        target: Tensor,
        source: Tensor,
        pinned: bool,
        after: Ticket | None = None,
        computed: Any = None,
    ) -> _StreamTicket:
        """Have a thread issue a copy that goes through pinned chunks, or has to wait for work on the host.

        Args:
            staging: Has the thread and the chunks.
            choose_stream: Returns the stream, when the copy is issued.
            target: The memory to copy to.
            source: The memory to copy from.
            pinned: Whether the host memory is pinned, and needs no chunks.
            after: The work on the host that has to be done first.
            computed: An event that the stream has to wait for then.
        """
        begin, event = self._events()

        def job() -> None:
            with torch.inference_mode(False), self._api.device(self.device):
                stream = choose_stream()
                if computed is not None:
                    stream.wait_event(computed)
                if begin is not None:
                    begin.record(stream)
                if pinned:
                    with self._api.stream(stream):
                        target.copy_(source, non_blocking=True)
                else:
                    staging.copy(target, source, lambda to, frm: self._copy(stream, to, frm))
                event.record(stream)

        return _StreamTicket(event, begin, started=staging.lane.submit(job, after))

    @override
    def work(
        self,
        job: Callable[[], None],
        after: Sequence[Ticket] = (),
        nbytes: int = 0,
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> Ticket:
        return self._host.submit(job, after, cleanup, rank)

    @override
    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _StreamTicket)
        if ticket.started is not None:  # waiting for an event that was never recorded does nothing
            ticket.started.join()
        self._api.current_stream(self.device).wait_event(ticket.event)

    @override
    def mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self.device))
        return event

    @override
    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @override
    def origin(self) -> Origin:
        self._api.synchronize(self.device)  # so that the event completes now, not when the device gets to it
        return super().origin()

    @property
    @override
    def can_pin(self) -> bool:
        return self.device.type == "cuda"

    @override
    def pin(self, memory: Tensor) -> bool:
        # torch's allocator of pinned memory rounds up to a power of two: up to twice the memory (pytorch#150517)
        if not self.can_pin or memory.nbytes == 0:
            return False
        with self._api.device(self.device), self._cores.nearby():
            done = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
            if not done:
                self._clear_error()
        return done

    def _clear_error(self) -> None:
        """Consume the error that a failed call leaves behind, or the next kernel launch would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    @override
    def unpin(self, memory: Tensor) -> None:
        with self._api.device(self.device):
            _cudart().cudaHostUnregister(memory.data_ptr())

    @override
    def total_memory(self) -> int | None:
        if not hasattr(self._api, "mem_get_info"):
            return None
        # the user may have limited the process with `torch.cuda.set_per_process_memory_fraction`
        allowed = getattr(self._api, "get_per_process_memory_fraction", lambda device: 1.0)
        return int(allowed(self.device) * self._api.mem_get_info(self.device)[1])

    @override
    def free_memory(self) -> int | None:
        allowed = self.total_memory()
        if allowed is None:
            return None
        used = int(self._api.memory_allocated(self.device))
        cached = int(self._api.memory_reserved(self.device)) - used
        return min(int(self._api.mem_get_info(self.device)[0]) + cached, max(0, allowed - used))

    @override
    def usable_memory(self) -> int | None:
        free = self.free_memory()
        return None if free is None else free + int(self._api.memory_allocated(self.device))

    @override
    def peak_memory(self) -> int | None:
        most = self.peak_since_reset()
        return None if most is None else max(self._peak_before_reset, most)

    @override
    def reset_peak_memory(self) -> int | None:
        if not hasattr(self._api, "reset_peak_memory_stats"):
            return None
        self._peak_before_reset = max(self._peak_before_reset, int(self._api.max_memory_allocated(self.device)))
        self._api.reset_peak_memory_stats(self.device)
        return int(self._api.memory_allocated(self.device))

    @override
    def peak_since_reset(self) -> int | None:
        if not hasattr(self._api, "reset_peak_memory_stats"):
            return None
        return int(self._api.max_memory_allocated(self.device))

    @override
    def allocation_retries(self) -> int:
        if not hasattr(self._api, "memory_stats"):
            return 0
        return int(self._api.memory_stats(self.device).get("num_alloc_retries", 0))

    @override
    def drain(self) -> None:
        self._download_staging.lane.drain()
        self._host.drain()
        self._upload_staging.lane.drain()
        self._up.synchronize()
        for stream in self._up_behind_work:
            stream.synchronize()
        self._down.synchronize()

    @override
    def close(self) -> None:
        self.drain()
        self._host.close()
        self._upload_staging.close()
        self._download_staging.close()


class _Staging:
    """Two small pinned chunks, through which a thread copies host memory that is not pinned itself.

    Without them the driver would copy such memory in small steps and block the host for each.
    """

    def __init__(self, backend: AcceleratorBackend, name: str) -> None:
        self.lane = CopyThread(name, backend.select_device)
        self._backend = backend
        self._chunks: list[Tensor] = []
        self._pinned: list[Tensor] = []

    def copy(self, target: Tensor, source: Tensor, copy_chunk: Callable[[Tensor, Tensor], Ticket]) -> None:
        """Copy chunk by chunk: while one is in flight, the other is filled or emptied."""
        self._allocate()
        to_device = source.device.type == "cpu"
        under_way: list[tuple[Ticket, Tensor, Tensor] | None] = [None, None]
        for number, start in enumerate(range(0, source.nbytes, _CHUNK_BYTES)):
            end = min(start + _CHUNK_BYTES, source.nbytes)
            self._finish(under_way, number % 2, to_device)
            chunk = self._chunks[number % 2][: end - start]
            if to_device:
                copy_memory(chunk, source[start:end])
                ticket = copy_chunk(target[start:end], chunk)
            else:
                ticket = copy_chunk(chunk, source[start:end])
            under_way[number % 2] = (ticket, target[start:end], chunk)
        for turn in (0, 1):
            self._finish(under_way, turn, to_device)

    def _finish(self, under_way: list[tuple[Ticket, Tensor, Tensor] | None], turn: int, to_device: bool) -> None:
        entry, under_way[turn] = under_way[turn], None
        if entry is not None:
            ticket, target, chunk = entry
            ticket.join()
            if not to_device:
                copy_memory(target, chunk)

    def _allocate(self) -> None:
        while len(self._chunks) < 2:
            chunk = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
            if self._backend.pin(chunk):
                self._pinned.append(chunk)
            self._chunks.append(chunk)

    def close(self) -> None:
        self.lane.close()
        for chunk in self._pinned:
            self._backend.unpin(chunk)
        self._pinned.clear()
        self._chunks.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
