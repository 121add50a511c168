"""What a backend asks of a device, on one that only pretends; copies and their order need a device: see tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from sp_lightning.pipeline import AcceleratorBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes import accelerator
from sp_lightning.pipeline.lanes.lanes import Job, Worker
from sp_lightning.planning.rates import probe
from sp_lightning.planning.work import Machine

from ...helpers import PATIENCE
from ..parts import RecordingBackend, pretend_a_device


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
    ticket = accelerator._StreamTicket(LostEvent(), None, nullcontext)
    failed = worker.submit(Job(lambda: done.append("with what never came"), [ticket]))
    worker.submit(Job(lambda: done.append("something else")))
    waiting = threading.Thread(target=worker.drain, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        failed.join()
    worker.close()
    assert done == ["something else"]


def test_events_are_asked_on_their_own_device() -> None:
    """Where another one is current, asking would make a context there; on two devices: test_second_device."""
    current: list[int] = []

    @contextmanager
    def on_device() -> Iterator[None]:
        current.append(1)
        yield
        current.pop()

    event = MagicMock(query=lambda: bool(current), synchronize=lambda: current[0])
    ticket = accelerator._StreamTicket(event, event, on_device)
    assert ticket.done
    ticket.join()
    ticket.interval(MagicMock())


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


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ValueError, match="`device=mps`.*no streams"):
        AcceleratorBackend(torch.device("mps"))


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_sent_is_page_locked_and_released(fails: bool) -> None:
    """As far as the system lets it; none is left registered after detach."""
    backend = RecordingBackend(pins=True)
    pin = backend.pin
    backend.pin = lambda memory: not (fails and backend.pinned) and pin(memory)  # type: ignore[method-assign]
    options = PipelineOptions(k=2, units=nn.Linear)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    with pytest.warns(UserWarning, match=r"could not be pinned.*WSL.*pin_memory") if fails else nullcontext():
        pipe = Pipeline(model, "cpu", options=options, backend=backend)
    assert pipe.summary().pinned is not fails
    assert backend.pinned
    pipe.detach()
    assert not backend.pinned


@pytest.mark.parametrize("is_pinned", [False, True])
def test_rates_are_of_memory_as_it_is_sent(is_pinned: bool) -> None:
    """Where a model could not be pinned, a small buffer may still be, and would promise fast copies."""
    backend = RecordingBackend(pins=True)
    asked = []
    backend.pin = lambda memory: asked.append(memory) is None  # type: ignore[method-assign]
    backend.unpin = lambda memory: None  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError):  # this device keeps no times
        probe(backend, Machine(1e9, 1e9, 1e9), is_pinned)
    assert bool(asked) is is_pinned


def test_a_single_queue_is_warned_of(pretended: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sets it, for an order of its own."""
    monkeypatch.setattr(accelerator, "use_expandable_segments", lambda stream: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1.*Unset it"):
        backend = AcceleratorBackend(torch.device("cuda", 0))
    assert backend.memory_rate == 0.8 * 2 * 10e6 * 64 / 8, "of a clock whose edges both count"
