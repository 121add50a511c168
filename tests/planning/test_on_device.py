"""Units that live on the device (`resident_optimizer=True`): chosen where they make steps faster, and exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.planning import AutoPlanner, Choice, Machine, UnitWork, Workload, choose, predict
from sp_lightning.planning.cost import device_bytes

from ..helpers import is_block
from ..simulated import UNIT_BYTES
from ..zoo.blocks import WIDTH, Block, Chain, chain
from .parts import Blocks, Fixed

SLOW_HOST = Blocks(forward=0.1, backward=0.9, up=0.1, down=0.9, step=2.0, units=12)
SLOW_COPIES = Blocks(forward=0.4, backward=0.8, up=1.5, down=0.9, step=0.5, units=12)


def attach(windows: list[tuple[Any, ...]] | None = None, **options: Any) -> tuple[Chain, Pipeline]:
    """Six blocks, of which some live on the device from the second step on."""
    torch.manual_seed(0)
    model = chain(6, 16, 32)
    planner = Fixed(*(windows or [(2, 1), (2, 1, (), (1, 4))]))
    choices = PipelineOptions(units=is_block, resident_optimizer=True, **options)
    backend = HostBackend(poison=True, max_delay=0.002)
    return model, Pipeline(model, "cpu", options=choices, backend=backend, planner=planner)


def take_steps(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("budget", [800, 1500, 2300, 4000, 6000])
@pytest.mark.parametrize("machine", [Machine(100, 100, 40), Machine(20, 100, 1000), Machine(500, 500, 30)])
def test_the_choice_is_nearly_the_fastest_of_all(budget: int, machine: Machine) -> None:
    """Against every number of units on the device, with every window."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_on_device=400)
    workload = Workload((unit,) * 10)
    choice, prediction = choose(workload, machine, budget)
    assert prediction == predict(workload, machine, choice)
    assert prediction.device_bytes <= budget
    every = [
        Choice(k, k_prime, kept=kept, on_device=there)
        for count in range(11)
        for there in [tuple((2 * n + 1) * 10 // (2 * count) for n in range(count))]
        for k in range(1, 11)
        for k_prime in (1, 2)
        if k >= k_prime
        for kept in [(), tuple(n for n in range(10) if n not in there)[::2]]
    ]
    fitting = [c for c in every if device_bytes(workload.with_on_device(c.on_device), c) <= budget]
    assert prediction.seconds <= 1.05 * min(predict(workload, machine, other).seconds for other in fitting)
    _, streamed = choose(replace(workload, units=(replace(unit, bytes_on_device=0),) * 10), machine, budget)
    assert prediction.seconds <= streamed.seconds
    assert bool(choice.on_device) == (prediction.seconds < streamed.seconds)


@pytest.mark.parametrize(
    "window", [(2, 1, (), (1, 5, 9)), (3, 1, (0, 2), (4, 11)), (2, 2, (), (0, 6)), (12, 1, (), (3,))]
)
@pytest.mark.parametrize("blocks", [SLOW_HOST, SLOW_COPIES], ids=["slow host", "slow copies"])
@pytest.mark.parametrize("in_backward", [True, False])
def test_the_replay_predicts_real_steps(blocks: Blocks, window: Any, in_backward: bool) -> None:
    real = blocks.train(Fixed(window), steps=4, in_backward=in_backward)
    k, k_prime, kept, there = window
    workload = blocks.workload(stepping="in backward" if in_backward else "under forward")
    replayed = predict(workload, blocks.machine, Choice(k, k_prime, kept, on_device=there))
    assert replayed.seconds == pytest.approx(real.seconds[-1], rel=0.01)


@pytest.mark.parametrize("blocks", [SLOW_HOST, SLOW_COPIES], ids=["slow host", "slow copies"])
def test_spare_memory_makes_steps_faster(blocks: Blocks) -> None:
    budget = 30 * UNIT_BYTES
    streamed = blocks.train(AutoPlanner(), memory_budget=budget)
    there = blocks.train(AutoPlanner(), memory_budget=budget, resident_optimizer=True)
    plan = there.summary.plan
    assert plan is not None
    assert plan.on_device
    assert plan.on_device_bytes == 2 * UNIT_BYTES * len(plan.on_device), "weight and gradient: SGD keeps nothing"
    assert there.counted <= budget
    assert plan.device_bytes == pytest.approx(there.counted, rel=0.05)
    assert there.seconds[-1] == pytest.approx(plan.step_seconds, rel=0.02)
    assert there.seconds[-1] < 0.8 * streamed.seconds[-1]


# -------------------------------------------------------------------------------------------------------- the engine


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


def test_the_summary_counts_units_on_the_device() -> None:
    model, pipeline = attach()
    optimizer = AdamW(model.parameters())
    take_steps(model, optimizer, 1)
    streamed = pipeline.summary()
    take_steps(model, optimizer, 1)
    summary = pipeline.summary()
    of_two = sum(p.nbytes for block in (model.blocks[1], model.blocks[4]) for p in block.parameters())
    steps = 2 * 4 * len(list(model.blocks[1].parameters()))
    assert summary.plan is not None
    assert summary.plan.on_device_bytes == 4 * of_two + steps, "weight, gradient, two moments"
    assert summary.device_bytes > summary.plan.on_device_bytes
    assert summary.model_bytes == streamed.model_bytes
    assert summary.parameters == streamed.parameters
    assert summary.optimizer_bytes == streamed.optimizer_bytes - 2 * of_two - steps
    pipeline.detach()


@pytest.mark.parametrize("scale", [None, 1024.0], ids=["no loss scale", "loss scale"])
def test_clipping_by_norm_is_not_left_to_plain_code(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of both kinds make one norm, bit by bit, and units are stepped while the device computes."""

    def train(streamed: bool) -> tuple[list[torch.Tensor], Pipeline | None]:
        torch.manual_seed(0)
        model, pipeline = attach() if streamed else (chain(6, 16, 32), None)
        optimizer = AdamW(model.parameters())
        for _ in range(4):
            loss = (model(torch.ones(4, 16)).square().mean()) * (scale or 1.0)
            if pipeline is None:
                loss.backward()
                for parameter in model.parameters() if scale else ():
                    assert parameter.grad is not None
                    parameter.grad.mul_(1 / scale)  # type: ignore[operator]
                clip_grad_norm_(model.parameters(), 0.01)
            else:
                with pipeline.optimizers.measuring_norms():
                    loss.backward()
                if scale:
                    assert pipeline.optimizers.unscale(optimizer, torch.tensor(1 / scale)) is False
                pipeline.optimizers.clip_grad_norm(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        if pipeline is not None:
            pipeline.detach()
        return [p.detach() for p in model.parameters()], pipeline

    expected, _ = train(False)
    monkeypatch.delattr(nn.utils, "clip_grad_norm_")
    actual, pipeline = train(True)
    assert all(map(torch.equal, expected, actual))
    assert pipeline is not None
    assert pipeline.stats.overlapped_steps > 0


def test_an_overflow_on_the_device_is_seen() -> None:
    model, pipeline = attach()
    optimizer = SGD(model.parameters(), 0.1)
    take_steps(model, optimizer, 2)
    with pipeline.optimizers.measuring_norms():
        model(torch.ones(4, 16)).square().mean().backward()
    gradient = model.blocks[4].norm.weight.grad
    assert gradient is not None
    gradient[0] = torch.inf
    assert pipeline.optimizers.unscale(optimizer, torch.tensor(0.5)) is True
    pipeline.detach()


def test_clipping_by_value_reaches_units_on_the_device() -> None:
    model, pipeline = attach()
    optimizer = SGD(model.parameters(), 0.1)
    take_steps(model, optimizer, 2)
    model(100 * torch.ones(4, 16)).square().mean().backward()
    pipeline.optimizers.clip_grad_value(list(model.parameters()), 1e-3)
    assert all(p.grad is not None and p.grad.abs().max() <= 1e-3 for p in model.parameters())
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


def test_optimizer_state_follows_its_weight_except_step_counts() -> None:
    """By torch's own rule: everything but the count of steps, and that, too, where a fused kernel counts."""
    makers = [(Adam, True), (lambda weights: Adam(weights, fused=True), False), (NAdam, True)]
    for make, steps_stay in makers:
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = make(weights)
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()
        here, there = weights[0], nn.Parameter(torch.ones(3, device="meta"))
        optimizer.param_groups[0]["params"][1] = there
        optimizer.state[there] = optimizer.state.pop(weights[1])
        on_device.move_state(optimizer, [there])
        state = optimizer.state[there]
        assert state["exp_avg"].device == state["exp_avg_sq"].device == there.device
        assert (state["step"].device.type == "cpu") == steps_stay
        assert here.device == optimizer.state[here]["exp_avg"].device
        assert on_device.state_bytes([optimizer], here) == sum(v.nbytes for v in optimizer.state[here].values())


@pytest.mark.parametrize("fails", range(6))
def test_gradients_survive_when_memory_runs_out_on_the_way(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an accumulation: units also move between its micro-batches."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(3)
    to, copies = Tensor.to, []

    def fail(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies.append(tensor)
        if len(copies) > fails:
            raise torch.OutOfMemoryError("no room")
        return to(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", fail)
        with pytest.raises(torch.OutOfMemoryError):
            on_device.move(weights, torch.device("cpu"), [])
    assert all(weight.grad is not None for weight in weights)


def test_an_optimizer_that_looks_at_all_weights_keeps_them_on_the_host() -> None:
    class Whole(AdamW):
        """What a subclass does is not known."""

    for cls in (AdamW, Whole):
        model, pipeline = attach([(2, 1)])
        optimizer = cls(model.parameters())
        take_steps(model, optimizer, 2)
        nbytes = [pipeline.survey.bytes_on_device(unit) for unit in pipeline.arrangement.units]
        assert all(nbytes) == (cls is AdamW)
        pipeline.detach()


def test_a_weight_that_changes_before_it_is_computed_with_again() -> None:
    model, pipeline = attach(activations="recompute")
    take_steps(model, SGD(model.parameters(), 0.1), 2)
    loss = model(torch.ones(4, 16)).square().mean()
    with torch.no_grad():
        next(model.blocks[4].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    pipeline.detach()


class Clamps(Block):
    """Changes its weights past their versions, when it has computed with them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.up.weight.data.clamp_(-0.1, 0.1)
        return torch.tanh(y) * y


@pytest.mark.parametrize("steps_before", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
def test_a_forward_that_changes_weights_on_the_device_does_not_run_again(steps_before: int) -> None:
    """They are plain weights there, whatever in the engine looks at those on the host."""
    trained = []
    for is_attached in (False, True):
        torch.manual_seed(0)
        model = Chain(Clamps() for _ in range(3))
        options = PipelineOptions(units=is_block, resident_optimizer=True, activations="recompute")
        windows = [(2, 1)] * steps_before + [(2, 1, (), (1,))]
        pipeline = Pipeline(model, "cpu", options=options, planner=Fixed(*windows)) if is_attached else None
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(5):
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if pipeline is not None:
            assert pipeline.arrangement.parameters_on_device
            pipeline.detach()
        trained.append([parameter.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *trained))


def test_units_that_do_not_fit_after_all_go_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be arranged once more, if there is room by then."""
    model, pipeline = attach()
    optimizer = AdamW(model.parameters())
    take_steps(model, optimizer, 1)
    move, tried = on_device.move, []

    def fail(parameters: Any, device: Any, optimizers: Any) -> None:
        move(parameters, device, optimizers)
        if parameters and not tried:
            tried.append(True)
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(on_device, "move", fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(4, 16))
    assert tried
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    take_steps(model, optimizer, 2)
    pipeline.detach()
