"""Streams, events and page-locks of real devices, on a simulated one that runs nothing before it must."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from sp_lightning.pipeline import AcceleratorBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.gradients.buffers import gradient_bytes
from sp_lightning.pipeline.lanes import accelerator
from sp_lightning.pipeline.lanes.worker import Worker

from ..fake_device import DeviceTensor, FakeDeviceModule
from ..parts import DoneTicket, PendingTicket


class Scene:
    """A backend over the fake device, and the memory a test copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = FakeDeviceModule()
        monkeypatch.setattr(torch, "get_device_module", lambda device: self.api)
        self.backend = AcceleratorBackend(torch.device("cpu"))

    def on_device(self, *values: int) -> DeviceTensor:
        return DeviceTensor.on(self.api, torch.tensor(values, dtype=torch.uint8))

    @staticmethod
    def on_host(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.uint8)

    def read_later(self, slot: DeviceTensor) -> list[list[int]]:
        """Launch a kernel that reads the slot; returns what it will have read."""
        read: list[list[int]] = []
        self.api.compute(lambda: read.append(slot.plain.tolist()))
        return read


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.backend.close()


@pytest.mark.parametrize("behind_work", [False, True])
def test_an_upload_waits_for_the_slots_last_reader(scene: Scene, behind_work: bool) -> None:
    """[Note: ordering of copies] A slot that is still read must not be overwritten."""
    slot, step = scene.on_device(1, 1), PendingTicket()
    read = scene.read_later(slot)
    ticket = scene.backend.upload(slot, scene.on_host(2, 2), step if behind_work else None)
    step.finish()
    ticket.join()
    assert read == [[1, 1]]
    assert slot.plain.tolist() == [2, 2]


def test_a_download_waits_for_what_computes_the_gradient(scene: Scene) -> None:
    gradient, target = scene.on_device(0, 0), scene.on_host(9, 9)
    scene.api.compute(lambda: gradient.plain.fill_(3))
    scene.backend.download(target, gradient).join()
    assert target.tolist() == [3, 3]


@pytest.mark.parametrize("waits", [True, False])
def test_computing_waits_for_the_copy(scene: Scene, waits: bool) -> None:
    """Without `wait` a kernel reads the old bytes: these tests can fail."""
    slot = scene.on_device(1)
    ticket = scene.backend.upload(slot, scene.on_host(2))
    if waits:
        scene.backend.wait(ticket)
    read = scene.read_later(slot)
    scene.api.finish_computing()
    assert read == [[2 if waits else 1]]


def test_the_host_never_waits(scene: Scene) -> None:
    """Nothing has run when upload, download and wait return; and the two directions do not wait for each other."""
    slot, gradient, target = scene.on_device(1), scene.on_device(5), scene.on_host(0)
    scene.backend.wait(scene.backend.upload(slot, scene.on_host(2), DoneTicket()))
    scene.backend.wait(scene.backend.download(target, gradient))
    assert [f"{stream}: {what}" for what, stream in scene.api.log] == [
        "up: wait for compute",
        "up: copy",
        "up: record",
        "compute: wait for up",
        "down: wait for compute",
        "down: copy",
        "down: record",
        "compute: wait for down",
    ]
    assert slot.plain.tolist() == [1]
    assert target.tolist() == [0]


def test_an_upload_after_work_sends_its_result(scene: Scene) -> None:
    """Who asks for it does not wait; who wants to compute with it does, until there is an event to wait for."""
    slot, source, step = scene.on_device(1, 1), scene.on_host(2, 2), PendingTicket()
    ticket = scene.backend.upload(slot, source, step)
    assert not ticket.done
    source.fill_(5)
    threading.Timer(0.03, step.finish).start()
    scene.backend.wait(ticket)
    read = scene.read_later(slot)
    scene.api.finish_computing()
    assert read == [[5, 5]]


def test_an_upload_after_work_is_issued_before_other_work(scene: Scene) -> None:
    """Though the other was given before."""
    slot, issued, first = scene.on_device(0), list[bool](), PendingTicket()
    step = scene.backend.work(lambda: None, [first], rank=1)
    scene.backend.work(lambda: issued.append(("copy", "up behind work") in scene.api.log), [step], rank=0)
    scene.backend.upload(slot, scene.on_host(1), step)
    first.finish()
    scene.backend.drain()
    assert issued == [True]


def test_an_upload_behind_work_does_not_wait_for_computing_that_came_later(scene: Scene) -> None:
    """Another copy may wait for that already; in one stream it would hold this one up."""
    first, second, step, computed = scene.on_device(0), scene.on_device(0), PendingTicket(), list[int]()
    behind = scene.backend.upload(first, scene.on_host(1), step)
    scene.api.compute(lambda: computed.append(1))
    other = scene.backend.upload(second, scene.on_host(2))
    step.finish()
    behind.join()
    assert computed == []
    other.join()
    assert computed == [1]


def test_copies_and_work_follow_each_other(scene: Scene) -> None:
    """Gradients land, weights are stepped, and sent; another download is not held up. The worker alone waits."""
    slot, target, weights = scene.on_device(0), scene.on_host(0), scene.on_host(0)
    arrived = scene.backend.download(target, scene.on_device(3))
    step = scene.backend.work(lambda: (weights.add_(target), None)[1], [arrived])
    scene.backend.upload(slot, weights, step)
    scene.backend.download(scene.on_host(0), scene.on_device(4)).join()
    scene.backend.drain()
    assert slot.plain.tolist() == [3]
    assert set(scene.api.synchronized_by) == {"superpipeline-host", threading.current_thread().name}
    assert scene.api.chosen == {"superpipeline-host": scene.backend.device}  # else it would be on the first one


@pytest.mark.parametrize("fails_before", [False, True])
def test_an_error_of_work_surfaces_where_its_upload_is_waited_for(scene: Scene, fails_before: bool) -> None:
    """Nothing is sent then, and the next upload goes on."""
    step, slot = PendingTicket(), scene.on_device(1)
    if fails_before:
        step.finish(ArithmeticError("the optimizer is lost"))
        with pytest.raises(ArithmeticError, match="the optimizer is lost"):
            scene.backend.upload(slot, scene.on_host(2), step)
    else:
        ticket = scene.backend.upload(slot, scene.on_host(2), step)
        step.finish(ArithmeticError("the optimizer is lost"))
        with pytest.raises(ArithmeticError, match="the optimizer is lost"):
            scene.backend.wait(ticket)
    assert slot.plain.tolist() == [1]
    scene.backend.upload(slot, scene.on_host(4)).join()
    assert slot.plain.tolist() == [4]


class LostEvent:
    """Of a device on which a kernel has failed: whoever asks is told."""

    def query(self) -> bool:
        raise RuntimeError("device-side assert triggered")

    synchronize = query


def test_an_error_of_the_device_ends_the_work_that_waits_for_it() -> None:
    """It ended the thread instead, and whoever waited for work on the host waited for ever."""
    worker, done = Worker("test-thread"), list[str]()
    failed = worker.submit(lambda: done.append("with what never came"), [accelerator._StreamTicket(LostEvent(), None)])
    worker.submit(lambda: done.append("something else"))
    waiting = threading.Thread(target=worker.drain, daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        failed.join()
    worker.close()
    assert done == ["something else"]


def test_device_memory(scene: Scene) -> None:
    """A fraction as `memory_budget` is of all of it; a process may be limited to a fraction of its own."""
    assert scene.backend.total_memory() == 7 << 20
    assert scene.backend.usable_memory() == (3 << 20) + (5 << 10)
    scene.api.fraction = 2 / 7
    assert scene.backend.usable_memory() == 2 << 20


def test_the_peak_is_that_of_the_run(scene: Scene) -> None:
    """And not since the engine has last counted it anew."""
    scene.api.peak = 9 << 10
    scene.backend.reset_peak_memory()
    assert scene.backend.peak_since_reset() == 1 << 10
    assert scene.backend.peak_memory() == 9 << 10
    scene.api.peak = 10 << 10
    assert scene.backend.peak_memory() == 10 << 10


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ValueError, match="`device=mps`.*no streams"):
        AcceleratorBackend(torch.device("mps"))


# ----------------------------------------------------------------------------------------------------------- page-locks


class PinningBackend(AcceleratorBackend):
    """A backend on the CPU that takes itself for CUDA where page-locks are concerned."""

    cleared = 0

    @property
    @override
    def can_pin(self) -> bool:
        return True

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
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(1 << 30)
    api = FakeDeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: api)
    monkeypatch.setattr(accelerator, "_cudart", lambda: made)
    return made


def chain() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def attach(model: nn.Module, **options: Any) -> tuple[Pipeline, PinningBackend]:
    backend = PinningBackend(torch.device("cpu"))
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


@pytest.mark.parametrize(("pin_memory", "pinned"), [("auto", False), (True, True)])
def test_page_locks_take_no_more_than_their_share(
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    pin_memory: Any,
    pinned: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Above the share nothing is page-locked, and it says so; a user who insists gets what they ask for."""
    monkeypatch.setattr("sp_lightning.pipeline.layout.host_share.total_host_memory", lambda: 5000)
    pipe, _ = attach(chain(), pin_memory=pin_memory)
    assert pipe.summary().pinned is pinned
    assert [str(warning.message)[:16] for warning in recwarn if "would page-lock" in str(warning.message)] == (
        [] if pinned else ["Pinning 4.2 KiB "]
    )
    pipe.detach()
    assert not runtime.registered


@pytest.mark.parametrize(
    ("pin_memory", "total", "left"),
    [(True, 5000, None), (False, 50_000, 0), ("auto", 50_000, 40_000), ("auto", 5000, 4000), ("auto", None, None)],
)
@pytest.mark.filterwarnings("ignore:.*would page-lock")
def test_bytes_that_may_be_page_locked_besides(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, pin_memory: Any, total: int | None, left: int | None
) -> None:
    """For activations there is what weights and gradients leave of the share; above it these are not page-locked."""
    monkeypatch.setattr("sp_lightning.pipeline.layout.host_share.total_host_memory", lambda: total)
    pipe, _ = attach(chain(), pin_memory=pin_memory)
    plan = pipe.arrangement
    pinnable = plan.host_share.pinnable
    weights = sum(parameter.nbytes for parameter in pipe.module.parameters())
    locked = weights + sum(map(gradient_bytes, plan.all_units)) if pipe.summary().pinned else 0
    pipe.detach()
    assert pinnable == (left and left - locked)
