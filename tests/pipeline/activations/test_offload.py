"""Activations that wait on the host: what leaves, when device memory goes, what comes back, and that it is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.pipeline import Backend, Stats
from sp_lightning.pipeline.activations import offload as offload_module
from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.activations.offload import Bundle, Offloaded, Offloader, Stage
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.units.unit import Member, Unit

from ..parts import RecordingBackend, bytes_lent

SMALLEST = 1024
ROWS = SMALLEST  # of a vector per feature, so that every tensor of these tests is large enough


@pytest.fixture(autouse=True)
def small_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "MIN_OFFLOAD_BYTES", SMALLEST)


class Scene:
    """An offloader, and hooks that hand it everything, as `SavedTensors` does with what is no weight."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend or RecordingBackend(pins=True)
        self.stats = Stats()
        self.meter = Meter(self.backend, self.stats)
        self.offloader = Offloader(self.backend, self.meter, self.stats)
        self.pool = self.offloader.pool
        self.packed: list[Any] = []
        self.member = Member("only", nn.Identity(), Unit("unit"))
        self.last: Bundle | None = None

    def call(self, forward: Callable[[], Tensor], is_last: bool = False) -> tuple[Tensor, Bundle]:
        """A unit's forward."""
        self.offloader.open.append(bundle := Bundle(self.member, True))
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                return forward(), bundle
        finally:
            self.leave(bundle, is_last)

    def leave(self, bundle: Bundle, is_last: bool = False) -> None:
        assert self.offloader.open.pop() is bundle
        bundle.before, self.last = self.last, bundle
        self.offloader.release_sent()
        if not is_last:
            self.offloader.send(bundle)

    def pack(self, tensor: Tensor) -> Any:
        packed = self.offloader.pack(tensor)
        self.packed.append(packed)
        return tensor.detach() if packed is None else packed

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Offloaded):
            return packed
        assert not packed.is_changed
        return self.offloader.unpack(packed)

    def stages(self, bundle: Bundle) -> list[Stage]:
        return [activation.stage for activation in bundle.alive()]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.offloader.close()


def large(*shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS,)), requires_grad=True)


def exp(x: Tensor) -> Callable[[], Tensor]:
    """A forward that saves its result."""
    return lambda: x.exp()


def test_host_memory_comes_back_from_any_thread(scene: Scene) -> None:
    """Autograd frees what a CUDA graph saved in a thread of its own: nothing is touched there."""
    y, _ = scene.call(exp(large()))
    scene.call(exp(large()))
    scene.packed.clear()
    held = [y]
    del y
    used = bytes_lent(scene.pool)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert bytes_lent(scene.pool) == used
    scene.offloader.release_sent()
    assert bytes_lent(scene.pool) < used


def test_a_part_of_a_large_memory_does_not_take_all_of_it_along(scene: Scene) -> None:
    matrix = torch.randn(64, ROWS)
    x = large(64, ROWS)
    _, column = scene.call(lambda: (x[:, 3] * matrix[:, 3]).sum())
    assert scene.stages(column) == []  # nothing of it leaves
    assert scene.backend.said("download") == []


def saved_by(scene: Scene, tensor: Tensor) -> Any:
    """What becomes of one tensor, saved in a unit."""
    scene.offloader.open.append(bundle := Bundle(scene.member, True))
    packed = scene.offloader.pack(tensor)
    scene.leave(bundle)
    scene.call(exp(large()))
    return packed


class Subclass(Tensor):
    """Somebody's tensors with a meaning of their own."""


STAYING = {
    "small": lambda: torch.randn(3),
    "empty": lambda: torch.randn(ROWS)[:0],
    "sparse": lambda: torch.eye(ROWS // 8).to_sparse(),
    "a subclass": lambda: torch.randn(ROWS).as_subclass(Subclass),
    "a parameter": lambda: nn.Parameter(torch.randn(ROWS)),
    "a leaf with a gradient": large,
    "conjugate": lambda: torch.randn(ROWS, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(ROWS, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(ROWS), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.as_nested_tensor([torch.randn(ROWS), torch.randn(3)]),
    "zeros without memory": lambda: torch._efficientzerotensor((ROWS,)),
}


@pytest.mark.parametrize("kind", STAYING)
@pytest.mark.filterwarnings("ignore")
def test_memory_that_is_not_plain_stays(scene: Scene, kind: str) -> None:
    assert saved_by(scene, STAYING[kind]()) is None


def test_buffers_and_their_views_stay(scene: Scene) -> None:
    buffer = torch.randn(4, ROWS)
    scene.meter.uncounted = {storage_key(buffer)}
    assert saved_by(scene, buffer) is None
    assert saved_by(scene, buffer[1]) is None


@pytest.mark.parametrize("when", ["before it left", "while it leaves"])
def test_a_change_in_place_is_noticed(scene: Scene, when: str) -> None:
    """As autograd would notice it; the copy may hold either of both."""
    tensor = torch.randn(ROWS)
    scene.offloader.open.append(bundle := Bundle(scene.member, True))
    packed = scene.offloader.pack(tensor)
    if when == "before it left":
        tensor.add_(1)
    scene.leave(bundle)
    if when == "while it leaves":
        tensor.add_(1)
    scene.call(exp(large()))
    assert packed.activation.stage is Stage.HOST
    assert packed.is_changed


def test_abandon_leaves_nothing_half_done(scene: Scene) -> None:
    """An exception in mid-forward; what it left behind can still be differentiated, and goes when it is dropped."""
    x = large()
    y, first = scene.call(exp(x))
    scene.offloader.open.append(Bundle(scene.member, True))
    scene.offloader.abandon()
    assert scene.offloader.open == []
    assert scene.stages(first) == [Stage.DEVICE]  # the copy may have failed
    assert scene.offloader.pack(torch.randn(ROWS)) is None
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    scene.packed.clear()
    del y
    scene.offloader.abandon()
    assert bytes_lent(scene.pool) == 0


def test_a_failed_copy_raises_and_is_never_used(scene: Scene) -> None:
    """On its way out: the device still has it. On its way back: it raises again."""
    x = large()
    scene.backend.fail_next("download", OSError("on purpose"))
    y, first = scene.call(exp(x))
    with pytest.raises(OSError, match="on purpose"):
        scene.call(exp(large()))
    scene.offloader.abandon()
    assert scene.stages(first) == [Stage.DEVICE]
    assert bytes_lent(scene.pool) == 0
    z, second = scene.call(exp(y))
    scene.call(exp(large()))
    scene.backend.fail_next("upload", OSError("on purpose"))
    with pytest.raises(OSError, match="on purpose"):
        torch.autograd.grad(z.sum(), x, retain_graph=True)
    scene.offloader.abandon()
    with pytest.raises(OSError, match="on purpose"):
        z.sum().backward()


PAGE = 4096


def test_growing_steps_do_not_pile_up(scene: Scene) -> None:
    """Other sizes each step, as with sentences of any length: what has become useless makes room."""
    most = 0
    for step in range(20):
        loans = [scene.pool.take((step + 2) * PAGE + 7) for _ in range(6)]
        most = max(most, bytes_lent(scene.pool))
        for loan in loans:
            scene.pool.give_back(loan)
    assert scene.pool.held <= 1.5 * most
    scene.pool.close()
    assert not scene.backend.pinned


def test_memory_is_given_up_only_when_no_copy_can_read_it(scene: Scene) -> None:
    for loan in [scene.pool.take(2 * PAGE) for _ in range(3)]:
        scene.pool.give_back(loan)
    assert scene.backend.said("drain") == []
    scene.pool.take(4 * PAGE)
    assert scene.backend.said("drain") == ["drain"]
