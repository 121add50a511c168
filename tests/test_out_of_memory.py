"""Steps that run out of device memory: who gets which error, and that training can go on after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning import SuperpipelineStrategy, superpipeline
from sp_lightning.pipeline import WindowPlan
from sp_lightning.trainer.narrator import out_of_memory_explained

from .lightning_modules import Base, assert_plain, fit, trainer

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Exhausted(Base):
    """Runs out of memory once, in the place that it is told."""

    def __init__(self, where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self.where, self.error = where, error or torch.OutOfMemoryError(CUDA)

    def exhaust(self, gradient: Any = None) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.where == "backward" and loss.requires_grad:
            loss.register_hook(self.exhaust)
        elif self.where == ("training" if self.training else "evaluation"):
            self.exhaust()
        return loss


class Manual(Exhausted):
    """Its backward is inside of its step."""

    def __init__(self) -> None:
        super().__init__("backward")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exhausted("training"),
        lambda: Exhausted("backward"),
        lambda: Exhausted("evaluation"),
        lambda: Exhausted("backward", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")),
        lambda: Exhausted("training", RuntimeError("CUDA driver error: out of memory")),
        Manual,
    ],
    ids=["training", "backward", "evaluation", "library", "driver", "manual"],
)
def test_the_error_says_what_a_step_takes_and_what_helps(make):
    module = make()
    original = module.error
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(trainer(SuperpipelineStrategy(k=2, activations="keep")), module)
    message = str(raised.value)
    assert message.startswith(str(original))
    assert message.count("superpipeline: this step had") == 1
    assert "for weights (`k=2` of 4 units)" in message
    assert raised.value.__cause__ is original
    if module.where == "evaluation":
        assert "activations" not in message
        assert message.endswith("Set `k=1`.")
    else:
        assert "(`activations='keep'`)" in message
        assert message.endswith("Set `activations='recompute'`.")
    assert_plain(module)


@pytest.mark.parametrize("error", [RuntimeError("the user's"), ValueError(CUDA)], ids=["runtime", "value"])
def test_other_errors_are_left_alone(error):
    with pytest.raises(type(error)) as raised:
        fit(trainer(SuperpipelineStrategy()), Exhausted("training", error))
    assert raised.value is error


@pytest.mark.parametrize(
    ("options", "plan", "remedy"),
    [
        ({"activations": "keep"}, None, "Set `activations='recompute'`."),
        ({"activations": "offload", "k": 2}, None, "Set `activations='recompute'`."),
        ({"activations": "recompute", "k": 2}, None, "Set `k=1`."),
        ({"k": 3}, None, "Set `k=1`."),
        ({"memory_budget": "100MiB"}, WindowPlan(3), f"Set `memory_budget={int(0.85 * (100 << 20))}`, so that"),
        ({"memory_budget": "100MiB"}, WindowPlan(3, on_device=("0",)), "is planned, and fewer units stay there."),
        ({}, None, "Set `k=1`."),
        ({"k": 1}, None, "Use smaller batches. If the logits"),
    ],
    ids=str,
)
def test_one_option_is_named(options, plan, remedy):
    """The one that gives up the most which the user, or the plan, has taken."""
    module = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    pipeline = superpipeline(module, "cpu", **options)
    arrangement = pipeline.arrangement
    if plan is not None:
        pipeline._engine.plan = arrangement.layout.window = plan
    arrangement.layout.units_on_device = [unit for unit in arrangement.units if plan and unit.name in plan.on_device]
    with pytest.raises(torch.OutOfMemoryError) as raised, out_of_memory_explained(pipeline, trains=True):
        raise torch.OutOfMemoryError(CUDA)
    pipeline.detach()
    (said,) = str(raised.value).splitlines()[1:]
    assert remedy in said
    assert said.count("Set `") + said.count("Use smaller") == 1


def test_the_advice_can_be_followed():
    """`k` counts single layers, as the argument does, where `k_prime` joins several of them."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(trainer(SuperpipelineStrategy(k=4, k_prime=2, activations="recompute")), Exhausted("training"))
    message = str(raised.value)
    assert "for weights (`k=4`: 2 of 2 units of 2 layers)" in message
    assert message.endswith("Set `k=1, k_prime=1`.")
    SuperpipelineStrategy(k=1, k_prime=1)
