"""Under Lightning: units that come to live on the device, and the numbers of the single-device strategy, bit by bit."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from ..lightning_modules import Base, assert_same_training, loader
from .parts import Fixed


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
        ({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, "offload"),
        ({"precision": "bf16-mixed", "accumulate_grad_batches": 2}, "recompute"),
    ],
    ids=["validation in between", "clipping by value", "bf16-mixed"],
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
    options = {"k": "auto", "activations": activations}
    module = partial(Base, blocks=6)
    assert_same_training(module, fit_in_two_parts, lambda: dict(arguments), **options)
    assert [max(on_device for *_, on_device in each.seen) for each in planners] == 4 * [3 * 6]
