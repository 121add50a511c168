"""The tests' own check of steps: a read that was not waited for, and a master among device tensors, raise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.calls.calls import Calls
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.units.unit import Residency

from .access_check import UNCHECKED, AccessCheck
from .helpers import attached
from .pipeline.parts import Placed, place


class Scene:
    """A check over two weights that are loaded, and waited for."""

    def __init__(self) -> None:
        optimizer_steps.depth = 0  # the last test may have ended one with an exception
        self.placed: Placed = place([torch.ones(2, 3), torch.ones(3)])
        self.placed.unit.residency = Residency.READABLE
        facts = {"twins": self.placed.by_memory, "weights": self.placed.weights, "parameters_on_device": []}
        plan: Any = SimpleNamespace(**facts)
        self.engine: Any = SimpleNamespace(arrangement=plan, at_work=False, device=torch.device("cpu"))
        self.check = AccessCheck(self.engine)

    @property
    def twin(self) -> Tensor:
        return self.placed.twins[0].data

    @property
    def master(self) -> Tensor:
        return self.placed.weights[0].host


@pytest.fixture
def scene() -> Scene:
    return Scene()


READS: list[Callable[[Tensor], object]] = [
    lambda w: w + 1,
    lambda w: torch.ones(1, 3) @ w.t(),
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
    lambda w: torch.ones(2, 3).add_(w),
    lambda w: torch._foreach_add([w], 1.0),
]


@pytest.mark.parametrize("read", READS)
def test_a_read_before_the_wait_raises(scene: Scene, read: Callable[[Tensor], object]) -> None:
    """The weight is named; after the wait the same operation is fine."""
    scene.placed.unit.residency = Residency.COMING
    with scene.check, pytest.raises(AssertionError, match="reads weight 'unit.0'.*not waited for"):
        read(scene.twin)
    scene.placed.unit.residency = Residency.READABLE
    with scene.check:
        read(scene.twin)


MIXTURES: list[Callable[[Tensor], object]] = [
    lambda w: w + torch.ones(2, 3),
    lambda w: torch.ones(1, 3) @ w.t(),
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
]


@pytest.mark.parametrize("mix", MIXTURES)
def test_a_master_among_device_tensors_raises(scene: Scene, mix: Callable[[Tensor], object]) -> None:
    """The emulated device would let it pass; a GPU would not."""
    with scene.check, pytest.raises(AssertionError, match="mixes the master of 'unit.0'"):
        mix(scene.master)


FINE: list[Callable[[Scene], object]] = [
    lambda s: s.master + 1,
    lambda s: s.master * torch.tensor(2.0),
    lambda s: s.master + s.placed.weights[1].host,
    lambda s: s.master.t(),
    lambda s: s.master.data.clamp_(0),
    lambda s: torch.ones(2, 3).add_(s.master),
    lambda s: s.twin + torch.ones(2, 3),
]


@pytest.mark.parametrize("work", FINE)
def test_ordinary_operations_pass(scene: Scene, work: Callable[[Scene], object]) -> None:
    """Masters among themselves and with scalars, writes in place (EMA), twins among device tensors, views."""
    with scene.check:
        work(scene)


def test_views_and_the_engines_own_work_are_no_reads(scene: Scene) -> None:
    """Autograd makes views of weights before they are there."""
    scene.placed.unit.residency = Residency.COMING
    with scene.check:
        scene.twin.t()
        scene.twin[0]
        scene.engine.at_work = True
        assert (scene.twin + scene.master).shape == (2, 3)


@pytest.mark.parametrize("debug", [True, False])
def test_a_step_is_checked_in_debug_only(debug: bool) -> None:
    """A unit's weight that a user kept, read when its slot may hold something else."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: kept.append(module._parameters["weight"].data))
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=1, units=nn.Linear, debug=debug))
    try:
        with pipeline.step():
            model(torch.ones(1, 4))
            if debug:
                with pytest.raises(AssertionError, match="reads weight '0.weight'"):
                    kept[0] + 1
            else:
                kept[0] + 1
    finally:
        pipeline.detach()


@pytest.mark.skipif(torch.__version__ < "2.10", reason="it compiles anew in each call, so it is not checked there")
def test_compiled_code_is_checked_and_stays_compiled(scene: Scene) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda w: torch.sin(w) + 1, backend=graphs)
    with scene.check:
        compiled(scene.twin)
    assert graphs.frame_count == 1
    scene.placed.unit.residency = Residency.COMING
    with scene.check, pytest.raises(AssertionError, match="was not waited for"):
        compiled(scene.twin)
    assert graphs.frame_count == 1


def test_operations_of_higher_order_are_checked(scene: Scene) -> None:
    """`flex_attention` is one."""
    x = scene.twin.view(1, 1, 2, 3)
    with scene.check:
        assert flex_attention(x, x, x).shape == x.shape
    scene.placed.unit.residency = Residency.COMING
    with scene.check, pytest.raises(AssertionError, match="was not waited for"):
        flex_attention(x, x, x)


def test_debug_itself_changes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a dispatch mode, an evaluation between forward and backward would round otherwise."""
    monkeypatch.setattr(Calls, "step", UNCHECKED)
    model, x = nn.Sequential(nn.GRU(8, 8, batch_first=True)), torch.randn(2, 5, 8)
    with torch.inference_mode():
        expected, _ = model(x)
    with attached(model, units=nn.GRU, debug=True) as pipeline, pipeline.step():
        model(x)[0].sum()
        with torch.inference_mode():
            actual, _ = model(x)
    assert torch.equal(actual, expected)
