"""Units that live on the device (`optimizer_on="auto"`): chosen where they make steps faster, and exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.planning import AutoPlanner
from sp_lightning.planning.measure import may_live_on_device

from ..helpers import is_block
from ..simulated import UNIT_BYTES
from ..zoo.blocks import Chain, chain
from .parts import Blocks, Fixed, mapped_without_collector, take_steps

SLOW_HOST = Blocks(forward=0.1, backward=0.9, up=0.1, down=0.9, step=2.0, units=12)
SLOW_COPIES = Blocks(forward=0.4, backward=0.8, up=1.5, down=0.9, step=0.5, units=12)


def attach(*windows: tuple[Any, ...]) -> tuple[Chain, Pipeline]:
    """Six blocks, of which two live on the device from the second step on, unless there are other windows."""
    torch.manual_seed(0)
    model = chain(6, 16, 32)
    planner = Fixed(*(windows or ((2,), (2, (1, 4)))))
    backend = HostBackend(poison=True, max_delay=0.002)
    return model, Pipeline(model, "cpu", options=PipelineOptions(units=is_block), backend=backend, planner=planner)


@pytest.mark.parametrize("blocks", [SLOW_HOST, SLOW_COPIES], ids=["slow host", "slow copies"])
def test_spare_memory_makes_steps_faster(blocks: Blocks) -> None:
    budget = 30 * UNIT_BYTES
    streamed = blocks.train(AutoPlanner(), memory_budget=budget, optimizer_on="host")
    there = blocks.train(AutoPlanner(), memory_budget=budget)
    plan = there.summary.plan
    assert plan is not None
    assert plan.on_device
    assert plan.on_device_bytes == 2 * UNIT_BYTES * len(plan.on_device), "weight and gradient: SGD keeps nothing"
    assert there.counted <= budget
    assert plan.device_bytes == pytest.approx(there.counted, rel=0.05)
    assert there.seconds[-1] == pytest.approx(plan.step_seconds, rel=0.1)
    assert there.seconds[-1] < 0.8 * streamed.seconds[-1]


def test_deterministic_placement_depends_on_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_host = Blocks(forward=1.0, backward=2.0, up=0.1, down=0.1, step=0.1, units=12)

    def living() -> list[tuple[str, ...]]:
        trained = [blocks.train(AutoPlanner(), memory_budget=20 * UNIT_BYTES) for blocks in (SLOW_HOST, fast_host)]
        return [each.summary.plan.on_device for each in trained if each.summary.plan is not None]

    by_time = living()
    assert by_time[0] != by_time[1]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    by_assumption = living()
    assert by_assumption[0] == by_assumption[1] != ()


def test_units_on_the_device_do_not_travel() -> None:
    model, pipeline = attach()
    optimizer = AdamW(model.parameters())
    take_steps(model, optimizer, 2)
    living = [model.blocks[1], model.blocks[4]]
    on_device = pipeline.arrangement.parameters_on_device
    assert {id(p) for block in living for p in block.parameters()} == set(map(id, on_device))
    before = pipeline.stats.bytes_to_device, pipeline.stats.bytes_to_host
    take_steps(model, optimizer, 2)
    moved = pipeline.stats.bytes_to_device - before[0], pipeline.stats.bytes_to_host - before[1]
    streamed = sum(p.nbytes for block in model.blocks for p in block.parameters() if block not in living)
    assert moved[1] <= 2 * streamed + 2 * 6 * 64 * 8, "gradients of four blocks, with room between them"
    assert all(type(p) is nn.Parameter for block in living for p in block.parameters()), "nothing guards them"
    pipeline.detach()


def test_detaching_restores_parameters_gradients_and_state() -> None:
    """Also in the middle of an accumulation, and an optimizer that has not stepped yet finds its state there."""
    model, pipeline = attach()
    optimizer, late = AdamW(model.parameters()), SGD(model.parameters(), 0.1, momentum=0.9)
    take_steps(model, optimizer, 2)
    model(torch.ones(4, 16)).square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    pipeline.detach()
    assert all(
        p.grad is not None and bool((p.grad == g).all()) for p, g in zip(model.parameters(), gradients, strict=True)
    )
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for each in (optimizer, late):
        each.step()


class Wrapper(Optimizer):
    """Averages weights with slow ones, which it keeps as state, or elsewhere."""

    def __init__(self, parameters: Any, hides: bool) -> None:
        self.inner = AdamW(parameters, 1e-2)
        super().__init__(self.inner.param_groups, {})
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]] if hides else []

    def step(self, closure: Any = None) -> None:
        closure()
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            p.data.lerp_(self.state[p].setdefault("slow", p.detach().clone()), 0.5)


LOOK_AT_WEIGHTS_TOGETHER: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": partial(LBFGS, lr=0.1, history_size=2, max_iter=2),
    "a wrapper": partial(Wrapper, hides=False),
    "a wrapper that hides what it keeps": partial(Wrapper, hides=True),
}


def losses_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Five steps, each in a closure that the optimizer may call several times."""
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(5):
        optimizer.step(closure)
    return losses


@pytest.mark.parametrize("name", LOOK_AT_WEIGHTS_TOGETHER)
def test_optimizers_that_look_at_weights_together(name: str) -> None:
    """Everything lives on the device, or nothing does, from the first forward of a step on: not in the middle of it."""
    plain = chain(6, 16, 32)
    expected = losses_of(plain, LOOK_AT_WEIGHTS_TOGETHER[name](plain.parameters()))
    everything = (2, range(7))
    model, pipeline = attach((2,), (2,), *3 * [everything], (2,))
    parameters = list(model.parameters())
    optimizer = LOOK_AT_WEIGHTS_TOGETHER[name](parameters)
    actual = losses_of(model, optimizer)
    assert torch.equal(torch.stack(expected), torch.stack(actual))
    assert {on_device for *_, on_device in pipeline._engine.planner.seen} == {0, len(parameters)}
    may_live = partial(may_live_on_device, pipeline.optimizers.states.optimizers)
    assert not any(may_live([parameter]) for parameter in parameters), "only who places units by hand has them there"
    other = nn.Parameter(torch.ones(1))
    assert not may_live([other]), "nobody has stepped it"
    assert may_live([other.requires_grad_(False)])
    pipeline.detach()


def test_they_take_no_host_memory() -> None:
    """Not for masters, copies and gradients, nor until garbage is collected; what streams has its own again."""
    everything = (2, range(7))
    bytes_taken = []
    with mapped_without_collector() as mapped:
        model, pipeline = attach((2,), (2,), everything, everything, (2,))
        optimizer = AdamW(model.parameters())
        for _ in range(6):
            take_steps(model, optimizer, 1)
            bytes_taken.append(mapped.nbytes())
    assert min(bytes_taken[:2] + bytes_taken[-1:]) >= sum(p.nbytes for p in model.parameters())
    assert bytes_taken[2:4] == [0, 0]
    pipeline.detach()
