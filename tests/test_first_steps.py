"""RAM that is too small for the first steps: as few units as necessary are on the GPU from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy, optim
from sp_lightning.trainer.host_memory import state_bytes

from .helpers import assert_same_trace
from .lightning_modules import Placed, note_state, trainer
from .zoo.blocks import Chain, Gated

BLOCKS, WIDTH, STEPS = 10, 48, 8
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": partial(torch.optim.AdamW, lr=1e-2),
    "fp32": partial(optim.AdamW, lr=1e-2),
    "int8": partial(optim.AdamW, lr=1e-2, moments="int8"),
}
CLIPPED = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
ASK_FOR_FREE_MEMORY = ("trainer.host_memory", "pipeline.placing.places", "planning.planner")


class Counted(Placed):
    """Notes, as each step begins, how many units stay on the device, and what the host holds."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make)
        self.model = Chain(Gated(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))
        self.living: list[int] = []
        self.host_bytes: list[int] = []

    def count(self) -> int:
        """Return the bytes of weights, gradients and optimizer state on the host."""
        strategy: Any = self.trainer.strategy
        if getattr(strategy, "pipeline", None) is None:  # weights alone, as it is not attached yet
            return sum(weight.nbytes for weight in self.parameters())
        counted = strategy.pipeline.summary()
        self.host_bytes.append(counted.host_bytes + counted.host_gradient_bytes + counted.optimizer_bytes)
        return self.host_bytes[-1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if isinstance(self.trainer.strategy, SuperpipelineStrategy):
            self.count()
            self.living.append(len(self.trainer.strategy.pipeline.summary().living))
        return super().training_step(batch, batch_idx)


def fit(
    make: str, precision: Any, training: dict[str, Any], share: float | None = None, **options: Any
) -> tuple[Counted, float]:
    """Train where the host holds a share of weights, copies and optimizer state, or plainly; return its bytes, too."""
    torch.manual_seed(1)
    module = Counted(MAKE[make])
    strategy = "auto" if share is None else SuperpipelineStrategy(units=[Gated], **options)
    ours = trainer(strategy, max_steps=STEPS, precision=precision, **training)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    weights = [nn.Parameter(weight.to(dtype)) for weight in module.parameters()]
    copies = sum(2 * weight.numel() for weight in weights) if precision == "bf16-mixed" else 0
    limit = (share or 1.0) * (sum(weight.nbytes for weight in weights) + copies + state_bytes(MAKE[make](weights)))
    micro_steps = training.get("accumulate_grad_batches", 1)
    batches = [torch.randn(5, WIDTH) for _ in range(STEPS * micro_steps)]
    with ExitStack() as patches:
        for where in ASK_FOR_FREE_MEMORY if share is not None else ():
            name = f"sp_lightning.{where}.available_host_memory"
            patches.enter_context(mock.patch(name, side_effect=lambda: limit - module.count()))
        ours.fit(module, DataLoader(batches, batch_size=None))
    note_state(module.trace, "end", module, ours.optimizers)
    return module, limit


@pytest.mark.parametrize(
    ("make", "precision", "training"),
    [
        ("torch", "32-true", {}), ("torch", "bf16-mixed", CLIPPED), ("fp32", "bf16-mixed", {}),
        ("fp32", "bf16-true", CLIPPED), ("int8", "bf16-true", {}), ("int8", "32-true", CLIPPED),
        ("int8", "bf16-mixed", CLIPPED),
    ],
    ids=lambda value: "clipped, accumulated" if value is CLIPPED else str(value or "plain"),
)  # fmt: skip
def test_few_units_stay_on_the_device_from_the_first_step_on(
    make: str, precision: str, training: dict[str, Any]
) -> None:
    """And all later plans keep them there; the host never holds more than it may, and no number changes."""
    expected, _ = fit(make, precision, training)
    actual, limit = fit(make, precision, training, 0.9, memory_budget="1MiB")
    assert_same_trace(expected.trace, actual.trace)
    assert 0 < actual.living[0] < BLOCKS
    assert min(actual.living) == actual.living[0]
    assert max(actual.host_bytes) <= limit
    with pytest.raises(MisconfigurationException, match="of optimizer state in CPU memory"):
        fit(make, precision, training, 0.9, memory_budget="1MiB", optimizer_on="host")


def test_none_stays_where_they_fit_without() -> None:
    actual, _ = fit("torch", "32-true", {}, 2.0, memory_budget="1MiB")
    assert actual.living[0] == 0
