"""One thread computes with a model: while any model is attached, autograd computes where backward is called."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import is_multithreading_enabled, set_multithreading_enabled

from sp_lightning.pipeline import Pipeline, PipelineOptions

from ...helpers import PATIENCE, attached
from ...zoo.blocks import WIDTH, chain

X = torch.ones(2, WIDTH)


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What it returns, or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return found[0]


PASSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "backward": lambda loss, _: loss.backward(),
    "autograd.backward": lambda loss, _: torch.autograd.backward(loss),
    "autograd.grad": torch.autograd.grad,
}


def uses_threads(run_pass: Callable[[Tensor, Tensor], Any] = PASSES["backward"]) -> bool:
    """Whether autograd may use threads of its own in a backward pass that is called here."""
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(is_multithreading_enabled()))
    run_pass(y.sum(), x)
    return seen[0]


def test_from_the_first_model_to_the_last() -> None:
    with ExitStack() as first:
        first.enter_context(attached(chain(3)))
        with attached(chain(3)):
            first.close()
            assert not uses_threads(), "the other model goes on"
    assert uses_threads()
    with pytest.raises(ValueError, match="too small"):
        Pipeline(chain(3), "cpu", options=PipelineOptions(memory_budget=100))
    assert uses_threads()


@pytest.mark.parametrize("run_pass", PASSES.values(), ids=PASSES)
def test_wherever_it_is_called(run_pass: Callable[[Tensor, Tensor], Any]) -> None:
    """In any thread and scope: torch switches autograd's threads on where it switches inference mode off."""
    with attached(chain(3)):
        for scope in (nullcontext(), torch.inference_mode(False), torch.enable_grad()):
            with scope:
                assert not uses_threads(run_pass)
                assert not in_a_thread(partial(uses_threads, run_pass))
                assert is_multithreading_enabled(), "outside of a pass nothing changes"
        with set_multithreading_enabled(False):
            assert not uses_threads(run_pass)
            assert not is_multithreading_enabled()


class Holds(torch.autograd.Function):
    """Holds something as long as its node lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Any]) -> Tensor:
        ctx.held = nn.Identity()
        held.append(weakref.ref(ctx.held))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    """Nodes that are to run next wait in the calling thread, with all activations, until it calls backward again."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("the hook fails")

    layer, held = nn.Linear(WIDTH, WIDTH), list[Any]()
    layer.weight.register_post_accumulate_grad_hook(fail)
    with attached(chain(3)):
        with pytest.raises(RuntimeError, match="the hook fails"):
            layer(Holds.apply(X.clone().requires_grad_() + 1, held)).sum().backward()
        assert [reference() for reference in held] == [None]


def test_a_backward_within_the_backward_of_another_thread_is_refused() -> None:
    """It would move weights that the first one is about to read; which goes on, and is right."""
    model, refused = chain(4), []
    with attached(model, activations="keep"):
        model(X).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        other, x = model(X).sum(), X.clone().requires_grad_()

        def run_the_other(_: Tensor) -> None:
            refused.append(in_a_thread(other.backward))

        hidden = model.blocks[1](model.blocks[0](x))
        hidden.register_hook(run_the_other)
        model.blocks[3](model.blocks[2](hidden)).sum().backward()
        assert "while another thread computes with it" in str(refused)
        assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))


@pytest.mark.parametrize("where", ["before", "within"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_backward_within_another_that_fails_and_is_caught(activations: Any, where: str) -> None:
    """The outer one goes on, whether or not it has reached the model by then; gradients are those of plain torch."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("the inner one")

    def fail_within(inner: Tensor, _: Tensor) -> None:
        with pytest.raises(ArithmeticError, match="the inner one"):
            inner.backward()

    results = []
    for scope in (nullcontext, partial(attached, activations=activations)):
        torch.manual_seed(0)
        model = chain(4)
        with scope() if scope is nullcontext else scope(model):
            for _ in range(3):
                hidden = model.blocks[1](model.blocks[0](X))
                hidden.register_hook(fail)
                inner = model.blocks[3](model.blocks[2](hidden)).sum()
                middle = model.blocks[1](model.blocks[0](2 * X))
                output = model.blocks[3](model.blocks[2](middle)) * 1
                (output if where == "before" else middle).register_hook(partial(fail_within, inner))
                output.square().sum().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
