"""Masters while a step runs: which operations go to the device, which stay on the host, and when."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.guard import (
    EngineAtWork,
    Guard,
    HostParameter,
    guards_resumed,
    guards_suspended,
    resume_guards,
    suspend_guards,
)
from sp_lightning.pipeline.weights import Weight

from .parts import place


class Owner:
    """A pipeline that writes down what it was asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.served: list[str] = []
        self.written: list[str] = []
        self.asked_for_leaves: list[str] = []

    def serve(self, weight: Weight) -> nn.Parameter:
        self.served.append(weight.name)
        return weight.twin.parameter

    def note_write(self, weight: Weight) -> None:
        self.written.append(weight.name)

    def in_graph(self, weight: Weight) -> Tensor:
        self.asked_for_leaves.append(weight.name)
        return weight.twin.parameter


class Scene:
    """Two guarded weights: masters of ones on the host, twins of twos on the "device"."""

    def __init__(self) -> None:
        self.placed = place([torch.ones(3, 3), torch.ones(3)])
        for twin in self.placed.twins:
            twin.data.fill_(2)
        self.owner = Owner()
        self.w, self.b = (weight.master for weight in self.placed.weights)
        self.guard = Guard(self.owner, self.placed.weights)
        self.guard.arm()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.guard.disarm()
    assert not guards_suspended()


COMPUTES: list[Callable[[Scene], Any]] = [
    lambda s: s.w + 1,
    lambda s: 1 + s.w,
    lambda s: -s.w,
    lambda s: s.w @ s.w,
    lambda s: torch.ones(1, 3) @ s.w,
    lambda s: F.linear(torch.ones(1, 3), s.w, s.b),
    lambda s: F.embedding(torch.tensor([0]), s.w),
    lambda s: s.w.sum(),
    lambda s: s.w.square().mean(),
    lambda s: s.w.norm(),
    lambda s: s.w.t(),
    lambda s: s.w.T,
    lambda s: s.w[0],
    lambda s: s.w.clone(),
    lambda s: s.w.view(-1),
    lambda s: s.w.to(torch.float64),
    lambda s: s.w.float(),
    lambda s: s.w == 2,
    lambda s: torch.cat([s.w, s.w]),
    lambda s: torch.stack((s.b, s.b)),
    lambda s: torch.einsum("ij,j->i", s.w, s.b),
    lambda s: torch.add(torch.ones(3), other=s.b),
    lambda s: torch.ones(3).add_(s.b),
    lambda s: torch._foreach_mul([s.w, s.b], 2.0)[0],
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
    lambda s: s.w.cpu(),
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
    scene.guard.disarm()
    masters = scene.w, scene.b
    scene.w, scene.b = (twin.parameter for twin in scene.placed.twins)  # type: ignore[assignment]
    assert torch.equal(result, work(scene))
    scene.w, scene.b = masters


@pytest.mark.parametrize("work", ON_THE_HOST)
def test_reading_attributes_means_the_master(scene: Scene, work: Callable[[Scene], Any]) -> None:
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
    lambda w: torch.add(torch.zeros(3, 3), 5, out=w),
]


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writing_in_place_means_the_master(scene: Scene, write: Callable[[Tensor], Any]) -> None:
    """The engine is told, so that the device gets the new values."""
    write(scene.w)
    assert scene.owner.written == ["unit.0"]
    assert scene.owner.served == []
    scene.guard.disarm()
    assert not torch.equal(scene.w, torch.ones(3, 3))
    assert scene.placed.twins[0].data.eq(2).all()


@pytest.mark.parametrize("ask", [lambda w: w.device, lambda w: torch.Tensor.device.__get__(w)])
def test_the_device_is_the_one_that_computes(scene: Scene, ask: Callable[[Tensor], Any]) -> None:
    """transformers places inputs by its first parameter's device."""
    scene.owner.device = torch.device("meta")
    assert ask(scene.w).type == "meta"
    assert not scene.w.is_cpu
    scene.guard.disarm()
    assert scene.w.is_cpu


def test_a_hand_made_ema_means_the_masters(scene: Scene) -> None:
    """Beside another tensor on the host a master is one, too."""
    scene.owner.device = torch.device("meta")
    average = torch.zeros(3, 3)
    with torch.no_grad():
        average.lerp_(scene.w, 0.5)
        moved = average + scene.w
    assert scene.owner.served == []
    assert average.eq(0.5).all()
    assert moved.eq(1.5).all()


def test_gradients_are_asked_of_the_leaf_in_the_graph(scene: Scene) -> None:
    """autograd.grad(loss, masters): the graph was built on the twins."""
    loss = (scene.placed.twins[0].parameter * 3).sum()
    (gradient,) = torch.autograd.grad(loss, [scene.w])
    assert scene.owner.asked_for_leaves == ["unit.0"]
    assert gradient.eq(3).all()


def test_disarmed_masters_are_ordinary(scene: Scene) -> None:
    assert type(scene.w) is HostParameter
    scene.guard.arm()
    scene.guard.disarm()
    assert type(scene.w) is nn.Parameter
    assert (scene.w + 1).eq(2).all()
    assert scene.owner.served == []
    scene.guard.disarm()


def test_an_optimizer_means_what_it_does(scene: Scene) -> None:
    """While one steps, masters are masters; a closure computes on the device again."""
    suspend_guards(sys._getframe())
    assert guards_suspended()
    assert (scene.w + 1).eq(2).all()
    with guards_resumed():
        assert not guards_suspended()
        assert (scene.w + 1).eq(3).all()
    assert (scene.w + 1).eq(2).all()
    resume_guards()
    assert (scene.w + 1).eq(3).all()


def test_optimizers_that_step_others(scene: Scene) -> None:
    """SAM, Lookahead: when the inner one has stepped, the outer one goes on."""
    suspend_guards(sys._getframe())
    suspend_guards(sys._getframe())
    resume_guards()
    assert guards_suspended()
    resume_guards()
    assert not guards_suspended()
    resume_guards()


def test_an_optimizer_that_raised_steps_no_more(scene: Scene) -> None:
    """torch calls no hook then."""

    def step() -> None:
        suspend_guards(sys._getframe())
        assert guards_suspended()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert not guards_suspended()
    assert (scene.w + 1).eq(3).all()


def test_an_optimizer_steps_in_its_own_thread(scene: Scene) -> None:
    """What another thread does with masters is no optimizer's doing."""
    seen: list[bool] = []
    suspend_guards(sys._getframe())
    thread = threading.Thread(target=lambda: seen.append(guards_suspended()))
    thread.start()
    thread.join()
    assert guards_suspended()
    resume_guards()
    assert seen == [False]


def test_the_engine_reads_masters_itself(scene: Scene) -> None:
    at_work = EngineAtWork()
    assert not at_work
    with at_work:
        assert at_work
        with at_work:
            assert (scene.w + 1).eq(2).all()
        assert at_work
    assert not at_work
    assert (scene.w + 1).eq(3).all()


def test_real_optimizers_step_masters_inside_of_a_step() -> None:
    """Momentum is made from masters, not from the device, and nothing becomes resident by it."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2, units=nn.Linear, debug=True))
    with pipeline.step():
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert pipeline.stats.promotions == 0
    pipeline.detach()


# --------------------------------------------------------------------------------------------------- copies and pickles


def tagged(parameter: nn.Parameter) -> nn.Parameter:
    """User code hangs things on parameters; torch pickles them."""
    parameter.no_decay = True  # type: ignore[attr-defined]
    return parameter


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert b"sp_lightning" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(value: Any) -> Any:
    data = pickle.dumps(value)
    assert b"sp_lightning" not in data
    return pickle.loads(data)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_made_in_a_step_is_an_ordinary_parameter(scene: Scene, duplicate: Callable[[Any], Any]) -> None:
    """With the master's values, not the device's; alone, twice in a list, and as part of a state."""
    scene.w.requires_grad_(False)
    first, second, state = duplicate([scene.w, scene.w, {"w": scene.w.data}])
    scene.guard.disarm()
    assert type(first) is nn.Parameter
    assert first is second
    assert torch.equal(first, scene.w)
    assert first.requires_grad is False
    assert torch.equal(state["w"], scene.w)
    assert first.data_ptr() != scene.w.data_ptr()
    assert scene.owner.served == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_made_in_a_step_keeps_what_a_plain_one_keeps(scene: Scene, duplicate: Callable[[Any], Any]) -> None:
    """Attributes on parameters survive a step's checkpoint exactly where they survive a plain one."""
    plain = duplicate(tagged(nn.Parameter(torch.ones(2))))
    guarded = duplicate(tagged(scene.b))
    assert vars(guarded) == vars(plain)
