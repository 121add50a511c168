"""Weights used outside of their unit under automatic optimization, where Lightning calls `training_step` inside of
`optimizer.step(closure)`: while an optimizer steps, the engine takes what is done to weights for the optimizer's doing,
but a closure computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sp_lightning.pipeline.modules.guard import HostParameter
from sp_lightning.pipeline.modules.suspension import guards_suspended

from .lightning_modules import Base, fit, plain, streamed, trainer


class Outside(Base):
    """Uses weights in the way that `use` names, besides the forward."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.seen: set[type] = set()
        self.own = nn.Parameter(torch.ones(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.add(type(next(self.parameters())))
        weights = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        if self.use == "penalty":
            loss = loss + 0.01 * sum(weight.square().sum() for weight in weights)
        elif self.use == "linear":
            loss = loss + F.linear(torch.ones(1, 2), self.own).square().sum() + weights[0].norm()
        elif self.use == "gradient":
            gradients = torch.autograd.grad(loss, weights[:1], create_graph=True, allow_unused=True)
            loss = loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)
        return loss


@pytest.mark.parametrize("use", ["penalty", "linear", "gradient"])
def test_weights_outside_of_their_unit_in_an_automatic_training_step(use: str) -> None:
    """The same numbers as plain training, and really served: masters are guarded inside of the closure."""
    theirs, ours = Outside(use), Outside(use)
    ours.load_state_dict(theirs.state_dict())
    for strategy, module in [(plain(), theirs), (streamed(), ours)]:
        torch.manual_seed(1)
        fit(trainer(strategy), module)
    for (name, expected), actual in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected, actual), name
    assert ours.seen == {HostParameter}
    assert theirs.seen == {nn.Parameter}


class Manual(Outside):
    """The same under manual optimization, inside of the closure that the user's code gives to the optimizer."""

    def __init__(self, use: str) -> None:
        super().__init__(use)
        self.automatic_optimization = False
        self.suspended: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            self.suspended.add(guards_suspended())
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("use", ["penalty", "linear", "gradient"])
def test_weights_outside_of_their_unit_in_a_closure_of_manual_optimization(use: str) -> None:
    """Where guards are not suspended, `debug` fails on any operation that mixes a master with what is on the device."""
    theirs, ours = Manual(use), Manual(use)
    ours.load_state_dict(theirs.state_dict())
    for strategy, module in [(plain(), theirs), (streamed(debug=True), ours)]:
        torch.manual_seed(1)
        fit(trainer(strategy), module)
    for (name, expected), actual in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected, actual), name
    assert ours.suspended == {False}
