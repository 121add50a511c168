"""Noticing optimizer steps: all who listen hear of them, and hooks go with the last one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.optimizer.kinds import listen_to_optimizers, stop_listening


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def before_closure(self) -> None:
        self.told.append("closure")

    def before_step(self, optimizer: Optimizer) -> None:
        self.told.append("before")

    def after_step(self, optimizer: Optimizer) -> None:
        self.told.append("after")


def test_all_listeners_hear_of_a_step_and_hooks_go_with_the_last_one() -> None:
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    listeners = [Listener(), Listener()]
    for listener in listeners:
        listen_to_optimizers(listener)
        listen_to_optimizers(listener)
    for listener in listeners:
        SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
        assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == (before[0] + 1, before[1] + 1)
        stop_listening(listener)
        stop_listening(listener)
    SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert [listener.told for listener in listeners] == [["before", "after"], ["before", "after"] * 2]
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_called_before_the_step_that_listeners_hear_of(keyword: bool) -> None:
    """As Lightning steps. It is the user's, and computes: weights that it uses are those on the device."""
    listener, optimizer = Listener(), SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def closure() -> Tensor:
        assert listener.told == ["closure"]
        assert not optimizer_steps.depth
        return torch.ones(1)

    listen_to_optimizers(listener)
    _ = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    stop_listening(listener)
    assert listener.told == ["closure", "before", "after"]
