"""Backward announces itself before it runs, and graphs are held for as long as weights are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.calls.graphs import before_backward


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y


def write_a_row(y: Tensor) -> Tensor:
    y[0] = 0
    return y


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1), lambda y: y[:1], lambda y: y.transpose(0, 1)[:1]])
@pytest.mark.parametrize("change", [lambda y: y, add_in_place, torch.Tensor.relu_, write_a_row])
def test_a_view_changed_in_place_still_announces(
    view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """Hooks on tensors are lost then, silently (pytorch#181832); prehooks of the base's node are not."""
    order: list[str] = []
    x = torch.ones(2, 2, requires_grad=True)
    x.register_hook(lambda _: order.append("input"))
    output = view(x * 3)
    before_backward([output], lambda _: order.append("announced"), since=1, now=1)
    change(output).square().sum().backward()
    assert order == ["announced", "input"]


class Fused(torch.autograd.Function):
    """As a fused kernel: its result is a view of what it has computed, or of its input."""

    order: ClassVar[list[str]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_input: bool) -> Tensor:
        return (x if of_input else x * 1).view(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Fused.order.append("function")
        return gradient.view(2, 2), None


@pytest.mark.parametrize(("of_input", "part"), [(False, None), (True, None), (False, slice(2))])
def test_a_view_that_a_custom_function_returns_announces_before_the_function_runs(
    of_input: bool, part: slice | None
) -> None:
    Fused.order = order = []
    x = torch.ones(2, 2, requires_grad=True)
    output = Fused.apply(x * 3, of_input)
    output = output if part is None else output[part]
    before_backward([output], lambda _: order.append("announced"), since=1, now=1)
    output.square().sum().backward()
    assert order == ["announced", "function"]


def test_a_node_belongs_to_the_call_that_made_it() -> None:
    """A call around that one announces itself, too; one that hands its input through does not."""
    order: list[str] = []
    y = torch.ones(2, requires_grad=True).exp()
    before_backward([y], lambda _: order.append("inner"), since=2, now=2)
    before_backward([y], lambda _: order.append("around"), since=1, now=2)
    before_backward([y], lambda _: order.append("hands through"), since=3, now=3)
    y.sum().backward()
    assert order == ["inner", "around"]
