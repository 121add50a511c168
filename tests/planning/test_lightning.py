"""Under Lightning: a run in which the window is planned gives what the single-device strategy gives, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_lightning.pipeline import WindowPlan

from ..lightning_modules import Base, assert_same_training

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
    assert len({id(plan) for plan in PLANS}) == 2, "planned once"
