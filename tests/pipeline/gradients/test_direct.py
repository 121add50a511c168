"""Gradients of masters themselves, of graphs that were built between steps; and weights that Functions are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import Run, assert_same_story, attached, note_gradients
from tests.zoo.blocks import chain

MESSAGE = r"Weight 'blocks.\d.* got a gradient from a graph that was built outside of a step.*`with pipeline.step"


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * sum((weight.square().sum() for weight in model.parameters()), torch.zeros(()))


class Scaled(torch.autograd.Function):
    """Has weights among its inputs, and saves them."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x * sum(weight.sum() for weight in weights)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        slope = (gradient * x).sum()
        return gradient * sum(weight.sum() for weight in weights), *(slope.expand_as(weight) for weight in weights)


def alone(model: nn.Module, early: Tensor) -> Tensor:
    return early


def with_a_step(model: nn.Module, early: Tensor) -> Tensor:
    return model(Run.rows(0)).square().mean() + early


@pytest.mark.parametrize("loss", [alone, with_a_step])
def test_they_are_refused(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """And the next step is right."""
    model = chain(4)
    with attached(model, debug=False) as pipe:
        for _ in range(2):
            early = penalty(model)
            with pytest.raises(RuntimeError, match=MESSAGE):  # noqa: PT012 - in backward, whatever the scope
                with pipe.step():
                    lost = loss(model, early)
                lost.backward()
            pipe.reset()
            model.zero_grad()
        model(Run.rows(0)).square().mean().backward()
        found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    model(Run.rows(0)).square().mean().backward()
    assert all(torch.equal(weight.grad, each) for weight, each in zip(model.parameters(), found, strict=True))


@pytest.mark.parametrize("give", [lambda weight: weight, lambda weight: weight[:]], ids=["weights", "views"])
def test_weights_that_a_function_is_given_in_a_step(give: Callable[[Tensor], Tensor]) -> None:
    def story(run: Run) -> None:
        for step in range(3):
            with run.step():
                y = Scaled.apply(run.model(run.rows(step)), *map(give, run.model.parameters()))
                (y.square().mean() + penalty(run.model)).backward()
            note_gradients(run.trace, str(step), dict(run.model.named_parameters()))

    assert_same_story(story, lambda: chain(4))


def test_a_weight_that_was_frozen_since() -> None:
    """Autograd adds nothing to the `.grad` of such a parameter."""

    def story(run: Run) -> None:
        run.normal_step("before", None)
        early = next(iter(run.model.parameters())).square().sum()
        next(iter(run.model.parameters())).requires_grad_(False)
        early.backward()
        note_gradients(run.trace, "after", dict(run.model.named_parameters()))

    assert_same_story(story, lambda: chain(2))
