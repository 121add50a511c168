"""Under Lightning: a run in which the window is planned gives what the single-device strategy gives, bit by bit."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from sp_lightning.pipeline import WindowPlan

from ..lightning_modules import Base, assert_same_training, loader
from .parts import Fixed

PLANS: list[WindowPlan | None] = []


class Watched(Base):
    """The plan in force is noted after each batch."""

    def __init__(self) -> None:
        super().__init__(blocks=6)

    def on_train_batch_end(self, *args: Any) -> None:
        pipeline = getattr(self.trainer.strategy, "pipeline", None)
        if pipeline is not None:
            PLANS.append(pipeline.summary().plan)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["plain", "clipping", "accumulation", "bf16-mixed"],
)
def test_a_planned_run_is_the_same(arguments: dict[str, Any]) -> None:
    PLANS.clear()
    assert_same_training(
        Watched, arguments=lambda: {"num_sanity_val_steps": 2, **arguments}, k="auto", memory_budget="1MB"
    )
    assert PLANS[0] is None
    assert PLANS[-1] is not None
    assert len({id(plan) for plan in PLANS}) == 1 + 2, "planned once in each of two runs"


class Adam(Watched):
    """With state that moves to the device with its unit, and back."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_in_two_parts(trainer: Any, module: Any) -> None:
    """A checkpoint is written when units live on the device, and read before any does."""
    trainer.fit(module, loader(), loader(2))
    with TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        written = torch.load(f"{folder}/one.ckpt", weights_only=True)
        module.note("weights in the checkpoint", list(written["state_dict"].values()))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(), loader(2), ckpt_path=f"{folder}/one.ckpt")


@pytest.mark.parametrize(
    ("arguments", "activations"),
    [
        ({"val_check_interval": 2}, "keep"),
        ({"gradient_clip_val": 0.1}, "recompute"),
        ({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, "offload"),
        ({"accumulate_grad_batches": 2}, "offload"),
        ({"precision": "bf16-mixed"}, "recompute"),
    ],
    ids=["validation in between", "clipping by norm", "clipping by value", "accumulation", "bf16-mixed"],
)
def test_units_that_live_on_the_device(
    arguments: dict[str, Any], activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on, others from the fifth."""
    planners: list[Fixed] = []

    def planner(*_: Any) -> Fixed:
        planners.append(Fixed((2, 1), (2, 1), (2, 1, (), (1, 4)), (2, 1, (), (1, 4)), (2, 1, (0,), (2, 3, 4))))
        return planners[-1]

    monkeypatch.setattr("sp_lightning.strategy.AutoPlanner", planner)
    options = {"k": "auto", "resident_optimizer": True, "activations": activations}
    assert_same_training(Adam, fit_in_two_parts, arguments=lambda: dict(arguments), **options)
    assert [max(on_device for *_, on_device in each.seen) for each in planners] == 4 * [3 * 6]
