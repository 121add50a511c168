"""Weights used outside of their unit, where Lightning or the user calls the step inside of `optimizer.step(closure)`:
while an optimizer steps, what is done to weights is taken for its doing, but a closure computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .lightning_modules import Base, assert_same_training


class Outside(Base):
    """Uses weights in the way that `use` names, besides the forward."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.own = nn.Parameter(torch.ones(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weights = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        if self.use == "penalty":
            return loss + 0.01 * sum(weight.square().sum() for weight in weights)
        if self.use == "linear":
            return loss + F.linear(torch.ones(1, 2), self.own).square().sum() + weights[0].norm()
        gradients = torch.autograd.grad(loss, weights[:1], create_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)


class Manual(Outside):
    def __init__(self, use: str) -> None:
        super().__init__(use)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("kind", [Outside, Manual])
@pytest.mark.parametrize("use", ["penalty", "linear", "gradient"])
def test_weights_outside_of_their_unit_in_a_closure(use: str, kind: type[Outside]) -> None:
    """`debug` fails on any operation that mixes a master with what is on the device."""
    assert_same_training(lambda: kind(use))
