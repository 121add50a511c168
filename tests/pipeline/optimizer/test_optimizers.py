"""Noticing optimizer steps: when the gradients are there, and when the weights have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sp_lightning.pipeline.optimizer.kinds import listen_to_optimizers, stop_listening
from sp_lightning.pipeline.weights.guard import optimizer_steps


class Listener:
    """Writes down what it is told, with the gradient and the weight of that moment."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(()))
        self.told: list[tuple[str, float | None, float]] = []
        self.closures = 0

    def _note(self, what: str) -> None:
        gradient = None if self.weight.grad is None else self.weight.grad.item()
        self.told.append((what, gradient, round(self.weight.item(), 5)))

    @property
    def heard(self) -> list[str]:
        return [what for what, *_ in self.told]

    def before_closure(self) -> None:
        self.closures += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self._note("before")

    def after_step(self, optimizer: Optimizer) -> None:
        self._note("after")

    def closure(self) -> Tensor:
        assert self.told == [] or self.told[-1][0] == "before", "told before the closure has made gradients"
        assert not optimizer_steps.depth, "it is the user's, and computes"
        self.weight.grad = None
        loss = (self.weight - 3).square()
        loss.backward()
        return loss


@pytest.fixture
def listener() -> Iterator[Listener]:
    optimizer_steps.depth = 0
    made = Listener()
    listen_to_optimizers(made)
    yield made
    stop_listening(made)
    assert not optimizer_steps.depth


STEPS: dict[str, Callable[[Optimizer, Callable[[], Tensor]], Any]] = {
    "positional": lambda optimizer, closure: optimizer.step(closure),
    "by keyword": lambda optimizer, closure: optimizer.step(closure=closure),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_with_a_closure_gradients_are_there_when_it_has_been_called(
    listener: Listener, step: Callable[[Optimizer, Callable[[], Tensor]], Any]
) -> None:
    """As Lightning steps: not before the closure, but before the update; and the loss comes back."""
    optimizer = SGD([listener.weight], lr=0.1)
    StepLR(optimizer, 1)  # it wraps `step` in the object
    assert step(optimizer, listener.closure).item() == 9
    assert listener.told == [("before", -6, 0), ("after", -6, 0.6)]
    optimizer.step(closure=None)
    assert listener.heard == ["before", "after"] * 2


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_listeners_hear_of_each_call_of_a_closure(
    listener: Listener, step: Callable[[Optimizer, Callable[[], Tensor]], Any]
) -> None:
    """LBFGS looks at the loss again and again."""
    step(LBFGS([listener.weight], max_iter=3), listener.closure)
    assert listener.heard == ["before"] * (len(listener.told) - 1) + ["after"]
    assert listener.closures == len(listener.told) - 1 > 1


def test_a_closure_that_raises(listener: Listener) -> None:
    """Nobody is told of a step that was none, and the next one is told of."""

    def fail() -> Tensor:
        raise KeyboardInterrupt

    optimizer = SGD([listener.weight], lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fail)
    assert listener.told == []
    optimizer_steps.depth = 0
    optimizer.step(listener.closure)
    assert listener.heard == ["before", "after"]


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
    assert [len(listener.told) for listener in listeners] == [2, 4]
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
