"""On the host of a device, optimizers step by torch's fused kernels where the user has left the choice to torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from sp_lightning.pipeline import Pipeline
from sp_lightning.pipeline.optimizer import unit_steps
from sp_lightning.pipeline.optimizer.kinds import Step


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


@contextmanager
def stepped_for_a_device(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
    """One step as for a GPU, with gradients of ones; yields the settings of the kernels that the optimizer ran."""
    settings: list[dict[str, Any]] = []

    def update_weights(step: Step, number: int, *args: Any) -> None:
        settings.append(step.settings[number])
        plainly(step, number, *args)

    plainly = unit_steps.update_weights
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Pipeline(module, "cpu") as pipeline, mock.patch.object(unit_steps, "update_weights", update_weights):
        pipeline._engine.steps.fused = True
        yield settings
        optimizer.step()
        pipeline._engine.settle()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": False}])
def test_fused_kernels_where_the_user_left_the_choice_to_torch(module, cls, flags):
    rate = torch.tensor(0.1) if cls is torch.optim.AdamW and "foreach" not in flags else 0.1
    optimizer = cls(module.parameters(), lr=rate, **flags)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with stepped_for_a_device(module, optimizer) as settings:
        pass
    assert {group["fused"] for group in settings} == ({True} if not flags else {flags.get("fused")})
    assert optimizer.param_groups[0]["fused"] is flags.get("fused")  # a checkpoint has what the user chose
    assert not any(map(torch.equal, before, module.parameters()))


def test_fused_kernels_do_not_forbid_clipping(module):
    """The flag that makes Lightning refuse to clip under a loss scaler is never set."""
    optimizer = torch.optim.AdamW(module.parameters())
    with stepped_for_a_device(module, optimizer):
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        MixedPrecision("16-mixed", "cpu").clip_gradients(optimizer, 1.0)
