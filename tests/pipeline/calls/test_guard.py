"""Masters: what goes to the device in a step, what stays on the host, and who waits between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_lightning.pipeline.calls.guard import Guard
from sp_lightning.pipeline.lanes.at_work import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import place


class Owner(Guard):
    """A guard that writes down what it was asked for."""

    def __init__(self, weights: list[Weight]) -> None:
        arrangement, window = SimpleNamespace(weights=weights), SimpleNamespace(settled=True)
        self.engine = SimpleNamespace(arrangement=arrangement, window=window, device=torch.device("cpu"))
        super().__init__(self.engine)  # type: ignore[arg-type]
        self.served: list[str] = []
        self.written: list[str] = []
        self.looked_at: list[str] = []
        self.gradients: list[str] = []

    def before_access(self, weight: Weight, writes: bool = False) -> None:
        if self.in_step or not self.window.settled:
            self.looked_at.append(weight.name)
        if self.in_step and writes:
            self.written.append(weight.name)

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        self.gradients.append(f"{weight.name} {'read' if reads else 'dropped'}")

    def serve(self, weight: Weight) -> nn.Parameter:
        self.served.append(weight.name)
        return weight.twin.parameter


class Scene:
    """Two guarded weights in a step: masters of ones on the host, twins of twos on the "device"."""

    def __init__(self) -> None:
        self.placed = place([torch.ones(3, 3), torch.ones(3)])
        for twin in self.placed.twins:
            twin.data.fill_(2)
        self.w, self.b = (weight.master for weight in self.placed.weights)
        self.guard = self.owner = Owner(self.placed.weights)
        self.guard.install()
        self.guard.in_step = True


@pytest.fixture
def scene() -> Iterator[Scene]:
    optimizer_steps.depth = 0  # of a test before that was interrupted in one
    made = Scene()
    yield made
    made.guard.remove()
    assert {type(made.w), type(made.b)} == {nn.Parameter}
    assert not optimizer_steps.depth


COMPUTES: list[Callable[[Scene], Any]] = [
    lambda s: s.w + 1,
    lambda s: 1 + s.w,
    lambda s: torch.ones(1, 3) @ s.w,
    lambda s: F.linear(torch.ones(1, 3), s.w, s.b),
    lambda s: F.embedding(torch.tensor([0]), s.w),
    lambda s: s.w.sum(),
    lambda s: s.w.t(),
    lambda s: s.w.T,
    lambda s: s.w[0],
    lambda s: s.w.view(-1),
    lambda s: s.w.to(torch.float64),
    lambda s: s.w.float(),
    lambda s: s.w == 2,
    lambda s: torch.cat([s.w, s.w]),
    lambda s: torch.einsum("ij,j->i", s.w, s.b),
    lambda s: torch.add(torch.ones(3), other=s.b),
    lambda s: torch.ones(3).add_(s.b),
    lambda s: torch._foreach_mul([s.w, s.b], 2.0)[0],
    lambda s: s.w.type(torch.float64),
]

ON_THE_HOST: list[Callable[[Scene], Any]] = [
    lambda s: s.w.shape,
    lambda s: s.w.size(0),
    lambda s: s.w.dtype,
    lambda s: s.w.numel(),
    lambda s: s.w.dim(),
    lambda s: len(s.w),
    lambda s: s.w.stride(),
    lambda s: s.w.data_ptr(),
    lambda s: s.w.requires_grad,
    lambda s: s.w.requires_grad_(True),
    lambda s: s.w.is_leaf,
    lambda s: s.w._version,
    lambda s: s.w.grad,
    lambda s: setattr(s.w, "grad", None),
    lambda s: setattr(s.w, "requires_grad", True),
    lambda s: s.w.untyped_storage(),
    lambda s: s.w.is_floating_point(),
    lambda s: repr(s.w),
    lambda s: hash(s.w),
    lambda s: s.w.tolist(),
    lambda s: s.w.detach().numpy(),
    lambda s: s.w.detach().cpu(),
    lambda s: s.w.register_hook(print),
    lambda s: isinstance(s.w, nn.Parameter),
    lambda s: {s.w: 1}[s.w],
]


@pytest.mark.parametrize("work", COMPUTES)
def test_computing_goes_to_the_device(scene: Scene, work: Callable[[Scene], Any]) -> None:
    """In whatever argument the master is: the values are the twin's."""
    result = work(scene)
    assert scene.owner.served
    assert scene.owner.written == []
    scene.w, scene.b = (twin.parameter for twin in scene.placed.twins)  # type: ignore[assignment]
    assert torch.equal(result, work(scene))
    scene.w, scene.b = (weight.master for weight in scene.placed.weights)


@pytest.mark.parametrize("work", ON_THE_HOST)
def test_reading_attributes_reads_the_master(scene: Scene, work: Callable[[Scene], Any]) -> None:
    work(scene)
    assert scene.owner.served == []
    assert scene.w.dtype is torch.float32


WRITES: list[Callable[[Tensor], Any]] = [
    lambda w: w.copy_(torch.zeros(3, 3)),
    lambda w: w.add_(1),
    lambda w: w.zero_(),
    lambda w: w.__setitem__(0, 5.0),
    lambda w: w.__iadd__(1),
    lambda w: w.__imul__(2),
    lambda w: w.clamp_(0, 0.5),
    lambda w: w.data.mul_(3),
    lambda w: setattr(w, "data", torch.zeros(3, 3)),
    lambda w: nn.init.normal_(w),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    lambda w: torch.add(torch.zeros(3, 3), 5, out=w),
]


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writing_in_place_changes_the_master(scene: Scene, write: Callable[[Tensor], Any]) -> None:
    """The engine is told, so that the device gets the new values."""
    write(scene.w)
    assert scene.owner.written == ["unit.0"]
    assert scene.owner.served == []
    scene.guard.in_step = False
    assert not torch.equal(scene.w, torch.ones(3, 3))
    assert scene.placed.twins[0].data.eq(2).all()


def test_the_device_of_a_weight_is_the_compute_device(scene: Scene) -> None:
    """transformers places inputs by its first parameter's device."""
    scene.owner.engine.device = torch.device("meta")
    assert scene.w.device.type == "meta"
    assert not scene.w.is_cpu
    scene.guard.in_step = False
    assert scene.w.is_cpu


def test_gradients_are_asked_of_the_leaf_in_the_graph(scene: Scene) -> None:
    """autograd.grad(loss, masters): the graph was built on the twins. Hooks on the masters run."""
    scene.w.register_hook(lambda gradient: 2 * gradient)
    for twin in scene.placed.twins:
        twin.parameter.requires_grad_()
    loss = (scene.placed.twins[0].parameter * 3).sum()
    (gradient,) = torch.autograd.grad(loss, [scene.w], retain_graph=True)
    assert gradient.eq(6).all()
    if torch.__version__ >= "2.14":  # older ones know no dictionaries
        assert torch.autograd.grad(loss, {"b": scene.b}, allow_unused=True, retain_graph=True) == {"b": None}
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, scene.b)
    assert scene.owner.served == []


def test_masters_are_masters_while_an_optimizer_steps(scene: Scene) -> None:
    """Also one that steps by another (SAM, Lookahead); a closure computes on the device again."""
    optimizer_steps.depth += 1
    optimizer_steps.depth += 1
    optimizer_steps.depth -= 1
    assert (scene.w + 1).eq(2).all()
    with optimizer_waits():
        assert (scene.w + 1).eq(3).all()
    assert (scene.w + 1).eq(2).all()
    optimizer_steps.depth -= 1
    assert (scene.w + 1).eq(3).all()


@pytest.mark.parametrize("in_step", [True, False])
def test_gradients_are_asked_for(scene: Scene, in_step: bool) -> None:
    """Only that one, and whether it is read or replaced."""
    scene.guard.in_step = in_step
    _ = scene.w.grad
    scene.w.grad = torch.ones(3, 3)
    del scene.w.grad
    assert scene.owner.gradients == ["unit.0 read", "unit.0 dropped", "unit.0 dropped"]
    assert scene.owner.looked_at == []
