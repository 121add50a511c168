"""Streams, events and page-locks of real devices, on a simulated one that runs nothing before it must."""

from __future__ import annotations

import threading
import time
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
from sp_lightning.pipeline.lanes.threads import Worker

from ..fake_device import DeviceTensor, FakeDeviceModule
from ..parts import DoneTicket, PendingTicket

CHUNK = 16


class Scene:
    """A backend over the fake device, and the memory a test copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = FakeDeviceModule()
        monkeypatch.setattr(torch, "get_device_module", lambda device: self.api)
        monkeypatch.setattr(accelerator, "_CHUNK_BYTES", CHUNK)
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: self.pinned)
        self.pinned = True
        self.backend = AcceleratorBackend(torch.device("cpu"))

    def on_device(self, *values: int) -> DeviceTensor:
        return DeviceTensor.on(self.api, torch.tensor(values, dtype=torch.uint8))

    @staticmethod
    def on_host(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.uint8)

    def events(self) -> list[str]:
        return [f"{stream}: {what}" for what, stream in self.api.log]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.backend.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_an_upload_waits_for_the_slots_last_reader(scene: Scene, pinned: bool) -> None:
    """[Note: ordering of copies] A slot that is still read must not be overwritten."""
    scene.pinned = pinned
    slot, read = scene.on_device(1, 1), list[list[int]]()
    scene.api.compute(lambda: read.append(slot.plain.tolist()))
    ticket = scene.backend.upload(slot, scene.on_host(2, 2))
    ticket.join()
    assert read == [[1, 1]]
    assert slot.plain.tolist() == [2, 2]


def test_threads_are_on_the_device(scene: Scene) -> None:
    """A new thread is on the first one, and would make a context there."""
    scene.pinned = False
    scene.backend.upload(scene.on_device(1), scene.on_host(2)).join()
    scene.backend.download(scene.on_host(3), scene.on_device(4)).join()
    scene.backend.work(lambda: None).join()
    assert set(scene.api.chosen) == {
        "superpipeline-staged-upload",
        "superpipeline-staged-download",
        "superpipeline-host",
    }
    assert set(scene.api.chosen.values()) == {scene.backend.device}


@pytest.mark.parametrize("pinned", [True, False])
def test_a_download_waits_for_what_computes_the_gradient(scene: Scene, pinned: bool) -> None:
    scene.pinned = pinned
    gradient, target = scene.on_device(0, 0), scene.on_host(9, 9)
    scene.api.compute(lambda: gradient.plain.fill_(3))
    scene.backend.download(target, gradient).join()
    assert target.tolist() == [3, 3]


@pytest.mark.parametrize("pinned", [True, False])
def test_computing_waits_for_the_copy(scene: Scene, pinned: bool) -> None:
    """`wait` orders the compute stream behind the copy; kernels launched later see the new bytes."""
    scene.pinned = pinned
    slot, read = scene.on_device(1, 1), list[list[int]]()
    ticket = scene.backend.upload(slot, scene.on_host(2, 2))
    scene.backend.wait(ticket)
    scene.api.compute(lambda: read.append(slot.plain.tolist()))
    scene.api.finish_computing()
    assert read == [[2, 2]]


def test_without_a_wait_a_kernel_reads_old_bytes(scene: Scene) -> None:
    """Without a wait the kernel reads the old bytes: the tests above can fail."""
    slot, read = scene.on_device(1, 1), list[list[int]]()
    scene.backend.upload(slot, scene.on_host(2, 2))
    scene.api.compute(lambda: read.append(slot.plain.tolist()))
    scene.api.finish_computing()
    assert read == [[1, 1]]


def test_the_host_never_waits(scene: Scene) -> None:
    """Upload, download and wait give work to streams; no synchronization, and nothing has run when they return."""
    slot, gradient, target = scene.on_device(1), scene.on_device(5), scene.on_host(0)
    first = scene.backend.upload(slot, scene.on_host(2))
    scene.backend.wait(first)
    second = scene.backend.download(target, gradient)
    scene.backend.wait(second)
    assert scene.events() == [
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


def test_up_and_down_do_not_wait_for_each_other(scene: Scene) -> None:
    """Two copy engines; a download that waits for its gradient does not hold up the next upload."""
    scene.backend.upload(scene.on_device(1), scene.on_host(2))
    scene.backend.download(scene.on_host(0), scene.on_device(1))
    assert not {"up: wait for down", "down: wait for up"} & set(scene.events())


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 3])
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_memory_that_is_not_page_locked_is_copied_in_chunks(scene: Scene, direction: str, nbytes: int) -> None:
    """Two chunks take turns: one must not be filled again before its copy has run."""
    scene.pinned = False
    values = torch.arange(nbytes, dtype=torch.uint8) + 1
    empty = torch.zeros(nbytes, dtype=torch.uint8)
    if direction == "upload":
        target, source = DeviceTensor.on(scene.api, empty), values
    else:
        target, source = empty, DeviceTensor.on(scene.api, values)
    ticket = getattr(scene.backend, direction)(target, source)
    ticket.join()
    assert torch.equal(empty, values)
    stream = {"upload": "up", "download": "down"}[direction]
    assert scene.events().count(f"{stream}: copy") == -(-nbytes // CHUNK)


def test_staged_copies_keep_their_order(scene: Scene) -> None:
    """A slot that is given away twice holds what came last."""
    scene.pinned = False
    slot = DeviceTensor.on(scene.api, torch.zeros(3 * CHUNK, dtype=torch.uint8))
    tickets = [scene.backend.upload(slot, torch.full((3 * CHUNK,), value, dtype=torch.uint8)) for value in range(4)]
    tickets[-1].join()
    assert set(slot.plain.tolist()) == {3}


def test_a_page_locked_copy_does_not_overtake_a_staged_one(scene: Scene) -> None:
    """Where only some memory could be page-locked, a place may be asked for by both kinds in a row."""
    slot, gate = scene.on_device(0), threading.Event()
    scene.backend._upload_staging.lane.submit(lambda: (gate.wait(5), None)[1])
    scene.pinned = False
    staged = scene.backend.upload(slot, scene.on_host(1))
    scene.pinned = True
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    direct = scene.backend.upload(slot, scene.on_host(2))
    staged.join()
    direct.join()
    opener.join()
    assert slot.plain.tolist() == [2]


@pytest.mark.parametrize("pinned", [True, False])
def test_an_upload_after_work_sends_its_result(scene: Scene, pinned: bool) -> None:
    """The thread that asks does not wait; computing does."""
    scene.pinned = pinned
    slot, source, step, read = scene.on_device(1, 1), scene.on_host(2, 2), PendingTicket(), list[list[int]]()
    ticket = scene.backend.upload(slot, source, step)
    assert not ticket.done
    source.fill_(5)
    threading.Timer(0.03, step.finish).start()
    scene.backend.wait(ticket)
    assert step.done, "an event that was not recorded yet would not be waited for"
    scene.api.compute(lambda: read.append(slot.plain.tolist()))
    scene.api.finish_computing()
    assert read == [[5, 5]]


@pytest.mark.parametrize("pinned", [True, False])
def test_an_upload_after_work_waits_for_the_slots_last_reader_too(scene: Scene, pinned: bool) -> None:
    """For kernels launched before it was asked for, and for no later ones."""
    scene.pinned = pinned
    slot, step, read = scene.on_device(1, 1), PendingTicket(), list[list[int]]()
    scene.api.compute(lambda: read.append(slot.plain.tolist()))
    ticket = scene.backend.upload(slot, scene.on_host(2, 2), step)
    step.finish()
    ticket.join()
    assert read == [[1, 1]]
    assert slot.plain.tolist() == [2, 2]


@pytest.mark.parametrize("first_pinned", [True, False])
@pytest.mark.parametrize("second_pinned", [True, False])
@pytest.mark.parametrize("second_waits", [True, False])
def test_uploads_keep_their_order_when_one_waits_for_work(
    scene: Scene, first_pinned: bool, second_pinned: bool, second_waits: bool
) -> None:
    """A place that is given away again, when computing has waited for the first copy, holds what came last."""
    slot, steps = scene.on_device(0), [PendingTicket(), PendingTicket()]
    scene.pinned = first_pinned
    first = scene.backend.upload(slot, scene.on_host(1), steps[0])
    steps[0].finish()
    scene.backend.wait(first)
    scene.pinned = second_pinned
    second = scene.backend.upload(slot, scene.on_host(2), steps[1] if second_waits else None)
    steps[1].finish()
    second.join()
    assert first.done
    assert slot.plain.tolist() == [2]


def test_an_upload_behind_work_takes_a_stream_that_is_idle(scene: Scene) -> None:
    """Another one that was issued before may have to wait for computing that has not come so far."""
    slots, steps, computed = [scene.on_device(0) for _ in range(3)], [PendingTicket() for _ in range(3)], list[int]()
    first = scene.backend.upload(slots[0], scene.on_host(1), steps[0])
    scene.api.compute(lambda: computed.append(1))
    others = [scene.backend.upload(slots[n], scene.on_host(1), steps[n]) for n in (1, 2)]
    for n in (1, 2, 0):
        steps[n].finish()
    first.join()
    assert computed == []
    for ticket in others:
        ticket.join()
    assert computed == [1]


@pytest.mark.parametrize("pinned", [True, False])
def test_an_upload_behind_work_does_not_wait_for_computing_that_came_later(scene: Scene, pinned: bool) -> None:
    """Another copy may wait for that already; in one stream it would hold this one up."""
    scene.pinned = pinned
    first, second, step, computed = scene.on_device(0), scene.on_device(0), PendingTicket(), list[int]()
    behind = scene.backend.upload(first, scene.on_host(1), step)
    scene.api.compute(lambda: computed.append(1))
    scene.pinned = True
    other = scene.backend.upload(second, scene.on_host(2))
    step.finish()
    behind.join()
    assert computed == []
    other.join()
    assert computed == [1]
    assert (first.plain.tolist(), second.plain.tolist()) == ([1], [2])


def test_an_upload_after_work_that_is_done_is_started_at_once(scene: Scene) -> None:
    """No thread between: the copy is on its stream before the next kernel is launched."""
    scene.backend.upload(scene.on_device(1), scene.on_host(2), DoneTicket())
    assert scene.events() == ["up: wait for compute", "up: copy", "up: record"]
    assert not scene.backend._upload_staging.lane.busy


@pytest.mark.parametrize("pinned", [True, False])
def test_a_download_is_not_held_up_by_an_upload_that_waits(scene: Scene, pinned: bool) -> None:
    """The step that the upload waits for may itself wait for these gradients."""
    scene.pinned = pinned
    slot, target = scene.on_device(0), scene.on_host(0)
    weights = scene.on_host(0)
    arrived = scene.backend.download(target, scene.on_device(3))
    step = scene.backend.work(lambda: (weights.add_(target), None)[1], [arrived])
    sent = scene.backend.upload(slot, weights, step)
    more = scene.backend.download(scene.on_host(0), scene.on_device(4))
    more.join()
    sent.join()
    assert slot.plain.tolist() == [3]


def test_only_the_thread_for_work_waits_for_its_inputs(scene: Scene) -> None:
    target, done = scene.on_host(0), list[int]()
    arrived = scene.backend.download(target, scene.on_device(3))
    scene.backend.work(lambda: done.extend(target.tolist()), [arrived]).join()
    assert done == [3]
    assert set(scene.api.synchronized_by) == {"superpipeline-host"}


@pytest.mark.parametrize("pinned", [True, False])
def test_an_error_of_work_surfaces_where_its_upload_is_waited_for(scene: Scene, pinned: bool) -> None:
    """And the next upload goes on."""
    scene.pinned = pinned
    step = PendingTicket()
    slot = scene.on_device(1)
    ticket = scene.backend.upload(slot, scene.on_host(2), step)
    step.finish(ArithmeticError("the optimizer is lost"))
    with pytest.raises(ArithmeticError, match="the optimizer is lost"):
        scene.backend.wait(ticket)
    assert slot.plain.tolist() == [1]
    scene.backend.upload(slot, scene.on_host(4)).join()
    assert slot.plain.tolist() == [4]


@pytest.mark.parametrize("pinned", [True, False])
def test_nothing_is_sent_after_work_that_has_failed_already(scene: Scene, pinned: bool) -> None:
    scene.pinned = pinned
    failed = PendingTicket()
    failed.finish(ArithmeticError("the optimizer is lost"))
    slot = scene.on_device(1)
    with pytest.raises(ArithmeticError, match="the optimizer is lost"):
        scene.backend.upload(slot, scene.on_host(2), failed)
    assert slot.plain.tolist() == [1]


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


@pytest.mark.parametrize("pinned", [True, False])
def test_drain_waits_for_chains_of_copies_and_work(scene: Scene, pinned: bool) -> None:
    scene.pinned = pinned
    gradient, weight, slot = scene.on_host(0), scene.on_host(1), scene.on_device(0)
    arrived = scene.backend.download(gradient, scene.on_device(3))
    step = scene.backend.work(lambda: (weight.add_(gradient), None)[1], [arrived])
    scene.backend.upload(slot, weight, step)
    scene.backend.drain()
    assert slot.plain.tolist() == [4]


def test_drain_waits_for_work_that_nothing_comes_after(scene: Scene) -> None:
    done: list[int] = []
    scene.backend.work(lambda: (time.sleep(0.03), done.append(1))[1])
    scene.backend.drain()
    assert done == [1]


def test_only_the_staging_threads_wait_for_chunks(scene: Scene) -> None:
    """The thread that computes waits for no chunk, in either direction."""
    scene.pinned = False
    big = torch.zeros(4 * CHUNK, dtype=torch.uint8)
    up = scene.backend.upload(DeviceTensor.on(scene.api, big.clone()), big)
    down = scene.backend.download(big, DeviceTensor.on(scene.api, big.clone()))
    scene.backend.wait(up)
    scene.backend.wait(down)
    assert set(scene.api.synchronized_by) == {"superpipeline-staged-upload", "superpipeline-staged-download"}


def test_an_error_while_staging_surfaces_at_the_wait(scene: Scene) -> None:
    """And not as an event that was never recorded."""
    scene.pinned = False
    ticket = scene.backend.upload(scene.on_device(1), SimpleNamespace(is_pinned=lambda: False, nbytes=3))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="device"):
        scene.backend.wait(ticket)
    scene.backend.upload(slot := scene.on_device(1), scene.on_host(4)).join()
    assert slot.plain.tolist() == [4]


def test_close_ends_the_threads(scene: Scene) -> None:
    scene.pinned = False
    scene.backend.upload(slot := scene.on_device(1), scene.on_host(4))
    scene.backend.close()
    assert slot.plain.tolist() == [4]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("superpipeline")]


def test_device_memory_is_known(scene: Scene) -> None:
    """A fraction as `memory_budget` is of all of it, not of what is free."""
    assert scene.backend.total_memory() == 7 << 20


def test_usable_memory_is_limited_as_the_process_is(scene: Scene) -> None:
    """By `torch.cuda.set_per_process_memory_fraction`; what the device has free, the process may not have."""
    assert scene.backend.usable_memory() == (3 << 20) + (5 << 10)
    scene.api.fraction = 2 / 7
    assert scene.backend.usable_memory() == 2 << 20


def test_the_peak_is_that_of_the_run(scene: Scene) -> None:
    """And not since the engine has last counted it anew."""
    scene.api.peak = 9 << 10
    scene.backend.reset_peak_memory()
    assert scene.backend.peak_since_reset() == 1 << 10
    assert scene.backend.peak_memory() == 9 << 10
    scene.api.peak = 8 << 10
    scene.backend.reset_peak_memory()
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
    monkeypatch.setattr(accelerator, "_CHUNK_BYTES", CHUNK)
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


def run_out_of_memory(nbytes: int) -> Tensor:
    if nbytes:
        raise torch.OutOfMemoryError(f"{nbytes} bytes")
    return torch.empty(0, dtype=torch.uint8)


def test_a_failed_arrangement_leaves_nothing_page_locked(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered copies are made before places on the device, for which there may be no memory."""
    pipe, backend = attach(chain(), pin_memory=True)
    x = torch.ones(1, 16)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.module(x).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(backend, "allocate", run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                pipe.module(x)
        pipe.module(x).sum().backward()
    pipe.detach()
    assert not runtime.registered


def test_a_failed_page_lock_is_cleared_and_warned_about(runtime: FakeRuntime) -> None:
    """cudaHostRegister leaves an error that the next kernel launch would raise; copies go through small chunks then."""
    runtime.limit = 3000
    with pytest.warns(UserWarning, match=r"could not be page-locked.*ulimit -l"):
        pipe, backend = attach(chain())
    assert backend.cleared > 0
    assert not pipe.summary().pinned
    assert 0 < sum(runtime.registered.values()) <= 3000
    pipe.detach()
    assert not runtime.registered


def test_pinning_can_be_switched_off(runtime: FakeRuntime) -> None:
    pipe, _ = attach(chain(), pin_memory=False)
    assert not runtime.registered
    assert not pipe.summary().pinned
    pipe.detach()


@pytest.mark.parametrize(("pin_memory", "pinned"), [("auto", False), (True, True)])
def test_page_locks_take_no_more_than_their_share(
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    pin_memory: Any,
    pinned: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Above the share small chunks are used, and it says so; a user who insists gets what they ask for."""
    monkeypatch.setattr("sp_lightning.pipeline.layout.host_share.total_host_memory", lambda: 5000)
    pipe, _ = attach(chain(), pin_memory=pin_memory)
    assert pipe.summary().pinned is pinned
    assert [str(warning.message)[:16] for warning in recwarn if "page-locked chunks" in str(warning.message)] == (
        [] if pinned else ["Pinning 4.2 KiB "]
    )
    pipe.detach()
    assert not runtime.registered


@pytest.mark.parametrize(
    ("pin_memory", "total", "left"),
    [(True, 5000, None), (False, 50_000, 0), ("auto", 50_000, 40_000), ("auto", 5000, 4000), ("auto", None, None)],
)
@pytest.mark.filterwarnings("ignore:.*page-locked chunks")
def test_bytes_that_may_be_page_locked_besides(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, pin_memory: Any, total: int | None, left: int | None
) -> None:
    """For activations there is what weights and gradients leave of the share; above it these are not page-locked."""
    monkeypatch.setattr("sp_lightning.pipeline.layout.host_share.total_host_memory", lambda: total)
    pipe, _ = attach(chain(), pin_memory=pin_memory)
    plan = pipe.arrangement
    pinnable = plan.host_share.pinnable_bytes()
    weights = sum(parameter.nbytes for parameter in pipe.module.parameters())
    locked = weights + sum(map(gradient_bytes, plan.all_units)) if pipe.summary().pinned else 0
    pipe.detach()
    assert pinnable == (left and left - locked)


def test_devices_other_than_cuda_page_lock_nothing(scene: Scene) -> None:
    """Only CUDA gains by it."""
    assert not scene.backend.can_pin
    assert not scene.backend.pin(torch.zeros(8, dtype=torch.uint8))


def test_staging_chunks_are_page_locked_once_and_released(runtime: FakeRuntime) -> None:
    backend = PinningBackend(torch.device("cpu"))
    for _ in range(3):
        backend.upload(torch.zeros(40, dtype=torch.uint8), torch.ones(40, dtype=torch.uint8)).join()
    assert sorted(runtime.registered.values()) == [CHUNK, CHUNK]
    backend.close()
    assert not runtime.registered
