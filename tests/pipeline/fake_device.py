"""A device with streams and events, simulated lazily: work runs only when something waits for it.

Nothing that is not ordered by an event or by a stream happens in the order in which it was asked for: each stream
keeps its work until somebody synchronizes with it, and then runs what that work waits for and no more. So a missing
wait shows as wrong bytes every time, not once in a thousand runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class FakeStream:
    """Work in the order in which it was given, run as far as it is asked for."""

    def __init__(self, api: FakeDeviceModule, name: str) -> None:
        self._api = api
        self.name = name
        self._work: list[Callable[[], None]] = []
        self._done = 0
        self._times = [0]

    def give(self, what: str, work: Callable[[], None]) -> None:
        with self._api.lock:
            self._api.log.append((what, self.name))
            self._work.append(work)

    def run(self, until: int) -> None:
        with self._api.lock:
            while self._done < until:
                work = self._work[self._done]
                self._done += 1
                work()
                self._api.clock += 1
                self._times.append(self._api.clock)

    def time_of(self, position: int) -> int:
        """When it had done so much: every piece of work, on any stream, takes a millisecond."""
        return self._times[position]

    def has_done(self, until: int) -> bool:
        return self._done >= until

    def position(self) -> int:
        return len(self._work)

    def wait_event(self, event: FakeEvent) -> None:
        event.must_be_recorded()
        stream, until = event.stream, event.until
        self.give(f"wait for {stream.name}", lambda: stream.run(until))

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._api)
        event.stream, event.until = self, self.position()
        return event

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._api.log.append(("synchronize", self.name))
        self.run(self.position())


class FakeEvent:
    """A place in a stream's work."""

    stream: FakeStream
    until: int = -1

    def __init__(self, api: FakeDeviceModule, enable_timing: bool = False) -> None:
        self._api = api
        self._is_timed = enable_timing

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._is_timed, "an event that was made without timing has no time"
        assert end._is_timed, "an event that was made without timing has no time"
        return float(end.stream.time_of(end.until) - self.stream.time_of(self.until))

    def record(self, stream: FakeStream) -> None:
        self.stream, self.until = stream, stream.position()
        self._api.log.append(("record", stream.name))

    def query(self) -> bool:
        return self.until < 0 or self.stream.has_done(self.until)  # a real event says so before it is recorded

    def must_be_recorded(self) -> None:
        # a real event that was not recorded is not waited for at all
        assert self.until >= 0, "an event was waited for before it was recorded"

    def synchronize(self) -> None:
        self.must_be_recorded()
        self._api.log.append(("synchronize event", self.stream.name))
        self._api.synchronized_by.append(threading.current_thread().name)
        self.stream.run(self.until)


class FakeDeviceModule:
    """What `torch.get_device_module` returns for a device."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[tuple[str, str]] = []
        self.synchronized_by: list[str] = []
        self.chosen: dict[str, torch.device] = {}  # by thread
        self.clock = 0
        self.peak = 0
        self.fraction = 1.0
        self._names = iter(["compute", "up", "up behind work", "down"])
        self._compute = self.Stream()
        self._current = threading.local()

    def Stream(self) -> FakeStream:
        return FakeStream(self, next(self._names))

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def synchronize(self, device: torch.device) -> None:
        self._compute.synchronize()

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def set_device(self, device: torch.device) -> None:
        self.chosen[threading.current_thread().name] = device

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return getattr(self._current, "stream", self._compute)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        yield
        self._current.stream = before

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3 << 20, 7 << 20

    def memory_reserved(self, device: torch.device) -> int:
        return 5 << 10

    def memory_allocated(self, device: torch.device) -> int:
        return 1 << 10

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.memory_allocated(device)

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def compute(self, work: Callable[[], None]) -> None:
        """Launch a kernel."""
        self._compute.give("compute", work)

    def finish_computing(self) -> None:
        """Run all kernels, and the copies that they wait for."""
        self._compute.run(self._compute.position())


class DeviceTensor(Tensor):
    """Memory that says it is the fake device's; copies from and to it are work for the current stream."""

    api: FakeDeviceModule

    @staticmethod
    def on(api: FakeDeviceModule, tensor: Tensor) -> DeviceTensor:
        made = tensor.as_subclass(DeviceTensor)
        made.api = api
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def plain(self) -> Tensor:
        """The same memory, to look at."""
        return self.as_subclass(Tensor)

    def __getitem__(self, index: Any) -> DeviceTensor:
        return DeviceTensor.on(self.api, self.plain[index])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            target, source = args
            api = next(operand.api for operand in args if isinstance(operand, DeviceTensor))
            assert (kwargs or {}).get("non_blocking"), "this copy would make the host wait"
            to, frm = target.as_subclass(Tensor), source.as_subclass(Tensor)
            api.current_stream().give("copy", lambda: to.copy_(frm))
            return target
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
