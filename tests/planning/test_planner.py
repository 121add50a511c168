"""A planner at work: on virtual clocks, against every window there is, and for models of four families."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sp_lightning.pipeline import Kind, Lane, Pipeline
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.planning import AutoPlanner, planner

from ..helpers import attached
from ..simulated import UNIT_BYTES, SimulatedBackend
from ..zoo.blocks import chain, rows
from .parts import MODELS, Blocks, Fixed, Trained, train

MACHINES = {
    Lane.COMPUTE: Blocks(forward=1.0, backward=2.0, up=0.9, down=1.6, step=0.5, units=12),
    Lane.TO_DEVICE: Blocks(forward=0.4, backward=0.8, up=1.0, down=0.9, step=0.5, units=12),
    Lane.TO_HOST: Blocks(forward=0.1, backward=0.9, up=0.1, down=2.0, step=0.5, units=12),
    Lane.HOST: Blocks(forward=0.1, backward=0.9, up=0.1, down=0.9, step=2.0, units=12),
}
LATER = {"in_backward": False}


def planned(model: nn.Module, **options: Any) -> AbstractContextManager[Pipeline]:
    """A pipeline with a planner over a model of Blocks, with delays and poison."""
    return attached(model, AutoPlanner(), k="auto", **options)


@cache
def trained_with_every_window(blocks: Blocks) -> list[Trained]:
    windows = [(k,) for k in range(1, 5)]
    windows += [(k, tuple(range(1, 12, 12 // living))[:living]) for k in (1, 2, 3) for living in range(1, 5)]
    return [blocks.train(Fixed(window[:1], window), steps=5) for window in windows]


@pytest.mark.parametrize(("bottleneck", "units"), [(lane, units) for lane in MACHINES for units in (2, 5)])
def test_a_plan_is_as_fast_as_the_best_that_fits(bottleneck: Lane, units: int) -> None:
    """Every k and number of living units is tried on the same machine; activations take the same in all."""
    blocks = MACHINES[bottleneck]
    budget = blocks.train(k=1, steps=2).counted + units * UNIT_BYTES
    every = trained_with_every_window(blocks)
    planned = blocks.train(AutoPlanner(), memory_budget=budget)
    plan = planned.summary.plan
    assert plan is not None
    assert planned.seconds[-1] <= 1.05 * min(run.seconds[-1] for run in every if run.counted <= budget)
    assert planned.counted <= budget
    assert plan.step_seconds == pytest.approx(planned.seconds[-1], rel=0.1)
    assert plan.device_bytes == pytest.approx(planned.counted, rel=0.01)
    assert units > 2 or plan.bottleneck is bottleneck, "with more units, less is moved"


@pytest.mark.parametrize(("share", "rate"), [(2.0, 5e7), (3.0, 2e6)], ids=["fast copies", "slow copies"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error")
def test_time_and_memory_of_real_models_are_predicted(name: str, share: float, rate: float) -> None:
    """Memory within 2 %, and never more than the budget; time within 10 %; 5 and 35 % where units are very uneven."""
    build, batch = MODELS[name]
    model = build()
    budget = int(share * sum(parameter.nbytes for parameter in model.parameters()))
    backend = SimulatedBackend(rate, rate, 5 * rate)
    trained = train(model, batch(1), backend, AutoPlanner(), steps=6, memory_budget=budget, optimizer_on="host")
    plan = trained.summary.plan
    assert plan is not None
    assert plan.step_seconds == pytest.approx(trained.seconds[-1], rel=0.35 if name == "ResNet" else 0.1)
    assert plan.device_bytes == pytest.approx(trained.counted, rel=0.05 if name == "ResNet" else 0.02)
    assert trained.counted <= budget


@pytest.mark.parametrize(
    "training",
    [{}, LATER, {**LATER, "overlap_optimizer": False}, {"accumulate": 3}, {**LATER, "frozen": True}],
    ids=["in backward", "under forward", "apart", "accumulation", "never"],
)
def test_the_planner_sees_when_the_optimizer_steps(training: dict[str, Any]) -> None:
    options = {"memory_budget": 20 * UNIT_BYTES}
    trained = MACHINES[Lane.HOST].train(AutoPlanner(), **options, **training)
    assert trained.summary.plan is not None
    assert trained.summary.plan.step_seconds == pytest.approx(trained.seconds[-1], rel=0.1)
    assert trained.seconds[-1] <= 1.01 * min(trained.seconds[1:]), "no step before the plan was faster"


@pytest.mark.parametrize(("k", "k_prime"), [(3, 1), (4, 2), ("auto", 2)])
@pytest.mark.parametrize("place", ["auto", "host"])
def test_explicit_values_are_obeyed(k: Any, k_prime: Any, place: Any) -> None:
    """Where units are stepped is chosen for them, too: that is `optimizer_on`'s."""
    options = {"k": k, "k_prime": k_prime, "optimizer_on": place, "memory_budget": 20 * UNIT_BYTES}
    summary = MACHINES[Lane.TO_DEVICE].train(AutoPlanner(), **options).summary
    assert k == "auto" or summary.k == k // k_prime
    assert summary.units == 12 // k_prime
    if k != "auto" and place == "host":
        assert summary.plan is None
        assert summary.device_bytes == k * UNIT_BYTES, "nothing else stays on the device"
    else:
        assert summary.plan is not None
        assert bool(summary.plan.on_device) == (place == "auto")


def test_on_the_cpu_without_a_budget_nothing_is_measured() -> None:
    with planned(chain(6)) as pipeline:
        for _ in range(5):
            pipeline.module(*rows()).square().mean().backward()
        assert (pipeline.summary().k, pipeline.summary().plan) == (2, None)


def test_too_small_a_budget_warns_and_takes_the_smallest_window() -> None:
    budget = UNIT_BYTES + 2 * (UNIT_BYTES + 256)  # gradients of a unit, with room for their norms, twice
    with pytest.warns(UserWarning, match=r"needs .*, but only .* are available\. Most of it is for one unit"):
        trained = MACHINES[Lane.COMPUTE].train(AutoPlanner(), memory_budget=budget)
    plan = trained.summary.plan
    assert plan is not None
    assert (plan.k, plan.on_device) == (1, ()), "nothing is left for activations"


def step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_much_larger_inputs_are_planned_anew() -> None:
    model = chain(8, 32, 64)
    total = 2 * sum(p.nbytes for p in model.parameters())
    optimizer = SGD(model.parameters(), 1e-3)
    plans = []
    with planned(model, memory_budget=total) as pipeline:
        pipeline._engine.meter.always = True
        for size in [4] * 6 + [5] * 3 + [24] * 8:
            pipeline.stats.activation_peak_bytes = 0
            step(model, optimizer, torch.randn(size, 32))
            summary = pipeline.summary()
            plans.append(summary.plan)
            counted = summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes
    assert counted <= total
    assert None not in plans[5:]
    assert plans[8].window == plans[5].window
    assert plans[-1].window != plans[5].window


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_unfrozen_layers_are_planned_anew(activations: Any) -> None:
    """More is saved and sent then; going back and forth between what was trained before costs nothing."""
    model = chain(8, 32, 64)
    total = 2 * sum(p.nbytes for p in model.parameters())
    optimizer = SGD(model.parameters(), 1e-3)
    for p in model.blocks[:4].parameters():
        p.requires_grad_(False)
    plans: list[Any] = []
    auto = AutoPlanner()
    with attached(model, auto, k="auto", memory_budget=total, activations=activations) as pipeline:

        def train(steps: int) -> None:
            for _ in range(steps):
                step(model, optimizer, torch.randn(8, 32))
                plans.append(pipeline.summary().plan)

        train(6)
        for p in model.parameters():
            p.requires_grad_(True)
        train(8)
        for frozen in (True, False) * 2:
            for p in model.blocks[:4].parameters():
                p.requires_grad_(not frozen)
            train(1)
    assert plans[5] is not None
    assert plans[6] is None, "measured again"
    assert plans[13] is not plans[5]
    if activations != "auto":  # which recomputes more units now if the times that were measured say so
        first, second = auto._plans.values()
        assert second.measured.activation_bytes > first.measured.activation_bytes
    assert plans[-1] is plans[13]


@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_a_step_without_a_backward_is_not_taken_for_one(activations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user skips batches after their forward: half of a step, to be measured again."""
    chosen = Mock(wraps=planner.choose)
    monkeypatch.setattr(planner, "choose", chosen)
    model = chain(8)
    optimizer = SGD(model.parameters(), 1e-3)
    with planned(model, memory_budget="1MiB", activations=activations) as pipeline:
        for number in range(8):
            if number in (0, 2, 3):
                model(*rows())
            else:
                step(model, optimizer, *rows())
        assert pipeline.summary().plan is not None
    assert all(unit.backward_seconds > 0 for unit in chosen.call_args_list[0].args[0].units)


def test_what_fails_in_a_recorded_step_is_raised_as_it_is() -> None:
    """And steps are measured again. It was lost in another error, of a recording that had nothing in it."""

    def fail() -> None:
        raise ArithmeticError("the optimizer is lost")

    model = chain(6)
    optimizer = SGD(model.parameters(), 1e-3)
    with planned(model, memory_budget="1MiB") as pipeline:
        for _ in range(3):
            step(model, optimizer, *rows())
        failed = pipeline.backend.work(Job(fail))
        pipeline.backend.trace.work(Kind.STEP, "blocks.0", Job(fail, [failed]))
        with pytest.raises(ArithmeticError, match="the optimizer is lost"):
            step(model, optimizer, *rows())
        for _ in range(6):
            step(model, optimizer, *rows())
        assert pipeline.summary().plan is not None
