"""The window grows and shrinks between steps, and no number changes: bit by bit, with delays and poison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.planning import AutoPlanner

from ..helpers import Plan, assert_exact, is_block
from ..zoo import CASES
from ..zoo.blocks import chain
from .parts import Fixed

GROWS = [(2, 1, ()), (3, 1, (1,)), (4, 2, (0, 5)), (6, 1, ()), (2, 1, (0, 1, 2, 3))]
LIVES = [(2, 1), (2, 1, (), (1, 4)), (2, 1, (0,), (4, 5)), (6, 1, (), (2,)), (1, 1, (), range(6)), (2, 2, (), (3,))]
SHRINKS = [(6, 3, ()), (4, 2, ()), (2, 2, (2,)), (1, 1, ()), (1, 1, (0, 4))]
OPTIMIZERS = {
    "SGD with momentum": lambda model: SGD(model.parameters(), 0.05, momentum=0.9),
    "AdamW": lambda model: AdamW(model.parameters(), 1e-2, weight_decay=0.1),
}


def train(
    planner: Any,
    optimizer: str,
    steps: int,
    *,
    clip: bool = False,
    autocast: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> tuple[list[torch.Tensor], Pipeline | None]:
    """Train plainly, or with units stepped in backward; nobody looks at a weight before the end."""
    torch.manual_seed(0)
    model = chain(6, 16, 32, dropout=0.1)
    pipeline = None
    if planner is not None:
        backend = HostBackend(poison=True, max_delay=0.002)
        choices = PipelineOptions(units=is_block, **options)
        pipeline = Pipeline(model, "cpu", options=choices, backend=backend, planner=planner)
    trained: Optimizer = OPTIMIZERS[optimizer](model)
    losses = []
    for _ in range(steps):
        for micro in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = model(torch.randn(8, 16)).float().square().mean()
            if pipeline is None or clip or micro < accumulate - 1:
                measured = clip and pipeline is not None
                with pipeline.optimizers.clipping.measuring_norms() if measured else torch.enable_grad():  # type: ignore[union-attr]
                    loss.backward()
            else:
                with pipeline.optimizers.stepping_in_backward(trained):
                    loss.backward()
            losses.append(loss.detach())
        if clip and pipeline is not None:
            pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.01)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        trained.step()
        trained.zero_grad()
    if pipeline is not None:
        pipeline.detach()
    states = [trained.state[parameter].values() for parameter in model.parameters()]
    kept = [value for values in states for value in values if isinstance(value, torch.Tensor)]
    return [*losses, *(p.detach() for p in model.parameters()), *kept], pipeline


def assert_equal(plain: Sequence[torch.Tensor], streamed: Sequence[torch.Tensor]) -> None:
    assert len(plain) == len(streamed)
    differ = [n for n, (one, other) in enumerate(zip(plain, streamed, strict=True)) if not torch.equal(one, other)]
    assert not differ, f"of {len(plain)}"


@pytest.mark.parametrize(
    ("windows", "optimizer"),
    [(GROWS, "SGD with momentum"), (SHRINKS, "AdamW"), (LIVES, "AdamW")],
    ids=["grows", "shrinks", "lives on the device"],
)
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"accumulate": 3},
        {"clip": True},
        {"autocast": True},
        {"activations": "recompute"},
        {"activations": "offload"},
        {"activations": "recompute_offload"},
    ],
    ids=["plain", "accumulation", "clipping", "bf16 autocast", "recompute", "offload", "both"],
)
def test_a_window_that_changes_at_every_step(windows: Any, optimizer: str, training: dict[str, Any]) -> None:
    planner = Fixed(*windows)
    plain = {key: value for key, value in training.items() if key != "activations"}
    expected, _ = train(None, optimizer, 7, **plain)
    actual, pipeline = train(planner, optimizer, 7, **training)
    assert_equal(expected, actual)
    assert pipeline is not None
    assert len({seen[:2] for seen in planner.seen}) >= 3, "the window did change"
    if windows is LIVES:
        assert len({on_device for *_, on_device in planner.seen}) == 4, "units came and went"
    elif not training:
        assert pipeline.stats.steps_in_backward >= 5 * 6, "units are stepped in backward in all of these windows"
    assert pipeline.stats.resets == 0
    assert pipeline.stats.heals == 0


@pytest.mark.parametrize("name", ["llama-untied", "t5"])
def test_families_of_models(name: str) -> None:
    """With everything that the zoo looks at: gradients, buffers, outputs in evaluation, and what is left behind."""
    case = CASES[name]
    planner = Fixed(*GROWS, *SHRINKS)
    assert_exact(case, PipelineOptions(debug=True), Plan.of(case), planner=planner)


@pytest.mark.parametrize("budget", [40_000, 200_000])
def test_planning_by_measuring_changes_no_number(budget: int) -> None:
    expected, _ = train(None, "AdamW", 8)
    actual, pipeline = train(AutoPlanner(), "AdamW", 8, memory_budget=budget, activations="auto")
    assert_equal(expected, actual)
    assert pipeline is not None
    assert pipeline.summary().plan is not None
