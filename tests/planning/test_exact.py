"""The window grows and shrinks between steps, and no number changes: bit by bit, with delays and poison."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

from sp_lightning.pipeline import PipelineOptions
from sp_lightning.planning import AutoPlanner

from ..helpers import Plan, assert_exact, assert_same_trace
from ..pipeline.gradients.parts import chain, train
from ..zoo import CASES
from .parts import Fixed, Make, train_placed

GROWS = [(2,), (3,), (4,), (6,), (2,)]
LIVES = [(2,), (2, (1, 4)), (2, (4, 5)), (6, (2,)), (1, range(6)), (2, (3,))]
SHRINKS = [(6,), (4,), (2,), (1,), (1,)]
MOMENTUM, ADAMW = partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize(
    ("windows", "optimizer"),
    [(GROWS, MOMENTUM), (SHRINKS, ADAMW), (LIVES, ADAMW)],
    ids=["grows", "shrinks", "lives on the device"],
)
@pytest.mark.parametrize(
    "training",
    [
        {}, {"accumulate": 3}, {"clip": 0.01}, {"autocast": True}, {"activations": "recompute"},
        {"activations": "offload"},
    ],
    ids=["plain", "accumulation", "clipping", "bf16 autocast", "recompute", "offload"],
)  # fmt: skip
def test_a_window_that_changes_at_every_step(windows: Any, optimizer: Make, training: dict[str, Any]) -> None:
    planner = Fixed(*windows)
    plain = {key: value for key, value in training.items() if key != "activations"}
    expected, _ = train_placed(optimizer, None, **plain)
    actual, stats = train_placed(optimizer, planner, in_backward=True, **training)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len({k for k, _ in planner.seen}) >= 3, "the window did change"
    assert len(planner.lives) == 1, "and nothing but places"
    if windows is LIVES:
        assert len({on_device for *_, on_device in planner.seen}) == 4, "units came and went"
    elif not training:
        assert stats.steps_in_backward >= 5 * 6, "units are stepped in backward in all of these windows"
    assert stats.resets == 0
    assert stats.heals == 0


@pytest.mark.parametrize("name", ["llama-untied", "t5"])
def test_families_of_models(name: str) -> None:
    """With everything that the zoo looks at: gradients, buffers, outputs in evaluation, and what is left behind."""
    case = CASES[name]
    planner = Fixed(*GROWS, *SHRINKS)
    assert_exact(case, PipelineOptions(debug=True), Plan.of(case), planner=planner)


def test_units_that_live_on_the_device_of_a_process_in_a_group() -> None:
    """Of one process, which has shared memory, sums of gradients and copies, as several have (`test_processes`)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = train(chain, None)
        planner = Fixed((2,), (2, (0, 3)), (2, (1, 2)))
        assert_same_trace(expected, train(chain, PipelineOptions(k=2, debug=True), planner=planner))
    finally:
        dist.destroy_process_group()
    assert [on_device > 0 for _, on_device in planner.seen] == [False, False, True], planner.seen


@pytest.mark.parametrize("budget", [40_000, 200_000])
def test_planning_by_measuring_changes_no_number(budget: int) -> None:
    planner = AutoPlanner()
    expected, _ = train_placed(ADAMW, None, steps=8)
    actual, _ = train_placed(ADAMW, planner, steps=8, in_backward=True, memory_budget=budget, activations="auto")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert planner._plans
