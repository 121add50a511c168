"""What a backend asks of a device, on one that only pretends; copies and their order need a device: see tests/gpu."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from typing_extensions import override

from sp_lightning.pipeline import AcceleratorBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes import devices
from sp_lightning.pipeline.lanes.lanes import Job, Worker

from ..parts import pretend_a_device


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    return pretend_a_device(monkeypatch)


class LostEvent:
    """Of a device on which a kernel has failed: whoever asks is told."""

    def query(self) -> bool:
        raise RuntimeError("device-side assert triggered")

    synchronize = query


def test_an_error_of_the_device_ends_the_work_that_waits_for_it() -> None:
    """It ended the thread instead, and whoever waited for work on the host waited for ever."""
    worker, done = Worker("test-thread"), list[str]()
    failed = worker.submit(Job(lambda: done.append("with what never came"), [devices._StreamTicket(LostEvent(), None)]))
    worker.submit(Job(lambda: done.append("something else")))
    waiting = threading.Thread(target=worker.drain, daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        failed.join()
    worker.close()
    assert done == ["something else"]


def test_device_memory(pretended: MagicMock) -> None:
    """A fraction as `memory_budget` is of all of it; a process may be limited to a fraction of its own."""
    backend = AcceleratorBackend(torch.device("cpu"))
    memory = backend.memory()
    assert memory.total == 7 << 20
    assert memory.free + memory.allocated == (3 << 20) + (5 << 10)
    pretended.get_per_process_memory_fraction.return_value = 2 / 7
    memory = backend.memory()
    assert memory.free + memory.allocated == memory.total == 2 << 20
    pretended.get_per_process_memory_fraction.return_value = 1e-4
    assert backend.memory().free == 0, "torch holds more than the process may take"
    del pretended.get_per_process_memory_fraction  # as on devices of other makers
    assert backend.memory().total == 7 << 20
    backend.close()


def test_the_peak_is_that_of_the_run(pretended: MagicMock) -> None:
    """And not since the engine has last counted it anew."""
    backend = AcceleratorBackend(torch.device("cpu"))
    pretended.max_memory_allocated.return_value = 9 << 10
    backend.count_peak_anew()
    pretended.max_memory_allocated.return_value = 1 << 10
    assert backend.memory()[3:5] == (1 << 10, 9 << 10)
    pretended.max_memory_allocated.return_value = 10 << 10
    assert backend.memory()[3:5] == (10 << 10, 10 << 10)
    backend.close()


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ValueError, match="`device=mps`.*no streams"):
        AcceleratorBackend(torch.device("mps"))


# ----------------------------------------------------------------------------------------------------------- page-locks


class PinningBackend(AcceleratorBackend):
    """A backend on the CPU that takes itself for CUDA where page-locks are concerned."""

    cleared = 0

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pins = True

    @override
    def _clear_error(self) -> None:
        self.cleared += 1
        super()._clear_error()


class FakeRuntime:
    """Registers host memory, as far as `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.registered.values()) + nbytes > self.limit:
            return 2
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(pretended: MagicMock, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(1 << 30)
    monkeypatch.setattr(devices, "_cudart", lambda: made)
    return made


def chain() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def attach(model: nn.Module, **options: Any) -> tuple[Pipeline, PinningBackend]:
    backend = PinningBackend()
    choices = PipelineOptions(k=2, k_prime=1, units=nn.Linear, **options)
    return Pipeline(model, "cpu", options=choices, backend=backend), backend


def test_buffers_that_are_sent_are_page_locked_and_released(runtime: FakeRuntime) -> None:
    """Exactly the bytes of the buffers, and none is left registered after detach."""
    pipe, backend = attach(chain())
    assert pipe.summary().pinned
    assert sum(runtime.registered.values()) == pipe.summary().host_bytes
    pipe.detach()
    assert not runtime.registered
    assert backend.cleared == 0


def test_a_failed_page_lock_is_cleared_and_warned_about(runtime: FakeRuntime) -> None:
    """cudaHostRegister leaves an error that the next kernel launch would raise."""
    runtime.limit = 3000
    with pytest.warns(UserWarning, match=r"could not be page-locked.*ulimit -l"):
        pipe, backend = attach(chain())
    assert backend.cleared > 0
    assert not pipe.summary().pinned
    assert 0 < sum(runtime.registered.values()) <= 3000
    pipe.detach()
    assert not runtime.registered
