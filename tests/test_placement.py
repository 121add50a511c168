"""Units that live on the device, visit it and are stepped on the host, in all precisions: plain training's bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sp_lightning import optim

from .helpers import assert_same_trace
from .lightning_modules import Placed, fit_placed
from .planning.parts import Fixed

OURS = partial(optim.AdamW, lr=1e-2)
INT8 = partial(OURS, moments="int8")
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)


@pytest.mark.filterwarnings("error:The plan expected GPU updates")
@pytest.mark.parametrize(
    ("precision", "make", "clip", "accumulate"),
    [
        ("32-true", FUSED, 0.01, 1),
        ("bf16-mixed", OURS, None, 1),  # with torch's fused ones, Lightning clips under no autocast
        ("bf16-mixed", OURS, 0.01, 2),
        ("16-mixed", OURS, None, 2),
        ("bf16-mixed", INT8, 0.01, 1),
        ("16-mixed", INT8, 0.01, 1),
        ("bf16-true", FUSED, None, 2),
    ],
    ids=lambda value: (
        value.keywords.get("moments", value.func.__module__) if isinstance(value, partial) else str(value)
    ),
)
def test_each_place_in_each_precision(precision: str, make: Any, clip: float | None, accumulate: int) -> None:
    """A unit lives, two visit from the second step on, three are stepped on the host."""
    expected, _ = fit_placed(make, None, precision, clip, accumulate)
    planner = Fixed((2,), (2, (0,), (1, 4)))
    actual, stats = fit_placed(make, planner, precision, clip, accumulate)
    assert_same_trace(expected, actual)
    assert stats.optimizer_steps == (5 if precision == "16-mixed" else 6)
    assert stats.visits == 2 * (stats.optimizer_steps - 1)
    assert max(on_device for *_, on_device in planner.seen) == 7
    assert len(planner.lives) == 1


class Reads(Placed):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.model.blocks[4].gate.grad is not None


class ClipsByValue(Placed):
    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@pytest.mark.parametrize(
    ("precision", "make", "module", "why"),
    [
        ("32-true", OURS, Reads, "the gradient of 'model.blocks.4.gate' was read"),
        ("bf16-mixed", OURS, ClipsByValue, "the gradient of 'model.blocks.4.*' was read"),
        ("32-true", partial(FUSED, amsgrad=True), Placed, "AdamW does not step all of their weights in one pass"),
        ("16-mixed", FUSED, Placed, "a GradScaler has left it to the optimizer's own kernel"),
    ],
    ids=["read", "clipped by value", "no pass", "scaler"],
)
def test_visits_that_never_happen_are_told(precision: str, make: Any, module: type[Placed], why: str) -> None:
    with pytest.warns(
        UserWarning, match=f"The plan expected GPU updates .* the slower CPU updates them, because .*{why}"
    ):
        _, stats = fit_placed(make, Fixed((2,), (2, (), (4,))), precision, module=module)
    assert stats.visits == 0
