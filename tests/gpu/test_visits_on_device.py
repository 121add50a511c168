"""Units that visit a real device, live there, or are stepped on the host, drawn at random: the same bits."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from sp_lightning import optim
from sp_lightning.optim import passes
from sp_lightning.pipeline.optimizer import visit

from ..helpers import never_waiting
from ..lightning_modules import fit_placed
from ..planning.parts import Fixed, Wanders, train_placed
from ..second_device import some
from .parts import BLOCKS, ROWS, WIDTH, big_chain, micro_step, on_device
from .unkind import slow_copies

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ADAMW = partial(optim.AdamW, lr=1e-2)
# the device makes a step by torch's own kernel, which on a GPU rounds in an order of its own
CLOSE = {"rtol": 0, "atol": 0} if "SECOND_DEVICE" in os.environ else {"rtol": 1e-2, "atol": 1e-4}


@pytest.mark.filterwarnings("error:The plan expected GPU updates")
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.01, 2)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_visits_in_each_precision(precision: str, clip: float | None, accumulate: int, accelerator: str) -> None:
    """All that were planned, with the numbers of steps on the host."""
    visiting = Fixed((2,), (2, (), (1, 2, 4)))
    (expected, _), (actual, stats) = (
        fit_placed(ADAMW, planner, precision, clip, accumulate, accelerator) for planner in (Fixed((2,)), visiting)
    )
    assert stats.optimizer_steps >= 5
    assert stats.visits == 3 * (stats.optimizer_steps - 1)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("seed", some([2, 3], 2))
@pytest.mark.parametrize("training", [{"in_backward": True}, {"clip": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placement_changes_no_number(
    dtype: torch.dtype, training: dict[str, Any], seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit, "PIECE", 1024)
    expected, _ = train_placed(ADAMW, Fixed((2,)), device, steps=10, dtype=dtype, **training)
    actual, stats = train_placed(ADAMW, Wanders(seed), device, steps=10, dtype=dtype, **training)
    assert stats.visits > 0
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("number", some([0, 1, 17, 30], 2))
def test_the_device_runs_out_of_memory_in_a_visit(
    number: int, clip: float | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host makes the step of that piece: it has all as it was, though the device has begun with the piece."""
    monkeypatch.setattr(visit, "PIECE", 1024)
    planner = partial(Fixed, (2,), (2, (), (1, 2, 4)))
    expected, _ = train_placed(ADAMW, planner(), device, clip=clip)
    step_on_device, seen = passes.step_on_device, list[object]()

    def runs_out(step: object) -> None:
        step_on_device(step)
        seen.append(step)
        if len(seen) == number + 1:
            raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(passes, "step_on_device", runs_out)
    with pytest.warns(UserWarning, match="the CPU had to update a part of 'blocks.*injected"):
        actual, stats = train_placed(ADAMW, planner(), device, clip=clip)
    assert stats.visits == 3 * 6
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_a_forward_does_not_wait_until_visits_are_down(cuda: torch.device) -> None:
    """It needs the new weights, which are there before. It waits for the thread, which knows the factor of clipping."""
    planner = Fixed((2,), (2, (), range(BLOCKS)))
    with slow_copies("host"), on_device(big_chain(), cuda, planner, memory_budget=1 << 32) as pipe:
        optimizer, clipping = optim.AdamW(pipe.module.parameters(), lr=1e-3), pipe.optimizers.clipping
        for step in range(6):
            waiting = nullcontext() if step < 3 else never_waiting(cuda, for_thread=True)
            with waiting, clipping.measuring_norms():
                micro_step(pipe, torch.randn(ROWS, WIDTH, device=cuda))
            clipping.clip_grad_norm(pipe.module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.stats.visits >= 3 * BLOCKS
