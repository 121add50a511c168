"""Masters: what goes to the device in a step, what stays on the host, and what is written there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_lightning.pipeline import Pipeline

from ...helpers import attached
from ..parts import RecordingBackend

X = torch.linspace(-1, 1, 6).view(2, 3)


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    """All lie on the device already. `debug` fails on operations that mix a master with what is on the device."""
    with attached(nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), k=4, units=nn.Linear) as pipe:
        pipe.module(X).sum().backward()
        pipe.module.zero_grad()
        yield pipe
    assert {type(parameter) for parameter in pipe.module.parameters()} == {nn.Parameter}


def resident_from_the_next_step_on(pipe: Pipeline) -> tuple[str, ...]:
    for _ in range(2):  # a step that uses it shows what it needs
        with pipe.step():
            pipe.module(X)
    return pipe.summary().resident


COMPUTES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda w, b: w + 1, lambda w, b: torch.ones(1, 3) @ w,
    lambda w, b: F.linear(torch.ones(1, 3), w, b), lambda w, b: F.embedding(torch.tensor([0]), w),
    lambda w, b: w.sum(), lambda w, b: w.t(), lambda w, b: w[0], lambda w, b: w.to(torch.float64),
    lambda w, b: torch.cat([w, w]), lambda w, b: torch.einsum("ij,j->i", w, b),
    lambda w, b: torch.add(torch.ones(3), other=b), lambda w, b: torch.ones(3).add_(b),
    lambda w, b: torch._foreach_mul([w, b], 2.0)[0], lambda w, b: w.type(torch.float64),
]  # fmt: skip

ON_THE_HOST: list[Callable[[nn.Parameter], Any]] = [
    lambda w: w.shape, lambda w: w.dtype, lambda w: len(w), lambda w: w.data_ptr(),
    lambda w: w.requires_grad, lambda w: w.requires_grad_(True), lambda w: w._version,
    lambda w: w.grad, lambda w: setattr(w, "grad", None),
    lambda w: setattr(w, "requires_grad", True), lambda w: w.untyped_storage(), lambda w: repr(w),
    lambda w: hash(w), lambda w: w.tolist(), lambda w: w.detach().numpy(),
    lambda w: w.detach().cpu(), lambda w: w.register_hook(print),
]  # fmt: skip

WRITES: list[Callable[[Tensor], Any]] = [
    lambda w: w.copy_(torch.zeros(3, 3)), lambda w: w.add_(1), lambda w: w.__setitem__(0, 5.0),
    lambda w: w.__imul__(2), lambda w: w.clamp_(0, 0.1), lambda w: w.data.mul_(3),
    lambda w: setattr(w, "data", torch.zeros(3, 3)), lambda w: nn.init.constant_(w, 0.3),
    lambda w: torch._foreach_mul_([w], 2.0), lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    lambda w: torch.add(torch.zeros(3, 3), 5, out=w),
]  # fmt: skip


@pytest.mark.parametrize("work", COMPUTES)
def test_computing_goes_to_the_device(pipe: Pipeline, work: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In whatever argument the master is; from the next step on the weight stays there."""
    weight, bias = pipe.module[1].weight, pipe.module[1].bias
    expected = work(weight.detach().clone(), bias.detach().clone())
    with pipe.step():
        assert torch.equal(work(weight, bias), expected)
    assert set(resident_from_the_next_step_on(pipe)) & {"1.weight", "1.bias"}


@pytest.mark.parametrize("work", ON_THE_HOST)
def test_reading_attributes_reads_the_master(pipe: Pipeline, work: Callable[[nn.Parameter], Any]) -> None:
    weight = pipe.module[1].weight
    with pipe.step():
        work(weight)
        assert weight.dtype is torch.float32
    assert resident_from_the_next_step_on(pipe) == ()


@pytest.mark.parametrize("write", WRITES)
def test_writing_in_place_changes_the_master(pipe: Pipeline, write: Callable[[Tensor], Any]) -> None:
    """The device gets the new values."""
    plain = copy.deepcopy(pipe.module)
    with torch.no_grad(), pipe.step():
        write(pipe.module[1].weight)
        write(plain[1].weight)
        assert torch.equal(pipe.module(X), plain(X))
    assert torch.equal(pipe.module[1].weight, plain[1].weight)
    assert resident_from_the_next_step_on(pipe) == ()


def test_the_device_of_a_weight_is_the_compute_device() -> None:
    """transformers places inputs by its first parameter's device."""
    pipeline = Pipeline(layer := nn.Linear(3, 3), "meta:0", backend=RecordingBackend())
    with pipeline.step():
        assert layer.weight.device.type == "meta"
        assert not layer.weight.is_cpu
    assert layer.weight.is_cpu
    pipeline.detach()


def by_grad(loss: Tensor, weights: list[nn.Parameter]) -> None:
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient


@pytest.mark.parametrize(
    "differentiate",
    [
        by_grad,
        lambda loss, weights: loss.backward(inputs=weights),
        lambda loss, weights: torch.autograd.backward([loss], inputs=weights),
    ],
    ids=["grad", "method", "function"],
)
def test_weights_are_meant_in_graphs_after_a_call_too(differentiate: Any, pipe: Pipeline) -> None:
    """A loop without a scope of its own: the step ends with the call, and its graph waits."""
    plain = copy.deepcopy(pipe.module)
    for module in (plain, pipe.module):
        differentiate(module(X).square().mean(), list(module[1:].parameters()))
    for expected, weight in zip(plain.parameters(), pipe.module.parameters(), strict=True):
        assert (expected.grad is None) == (weight.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, weight.grad)


def test_a_hook_for_all_of_several_gradients_between_steps_is_an_error(pipe: Pipeline) -> None:
    """It counts nodes of graphs, which are not built on masters. In a step it is right."""
    called: list[Any] = []
    weights = list(pipe.module.parameters())
    with torch.autograd.graph.register_multi_grad_hook(weights, called.append):
        loss = pipe.module(X).sum()
        with pytest.raises(RuntimeError, match="`torch.autograd.graph.register_multi_grad_hook` was given weights"):
            loss.backward()
    pipe.module.zero_grad()
    with pipe.step():
        used = [weight[:] for weight in weights]
        torch.autograd.graph.register_multi_grad_hook(used, called.append)
        sum(weight.sum() for weight in used).backward()
    assert len(called) == 1


def test_gradients_are_asked_of_the_leaf_in_the_graph(pipe: Pipeline) -> None:
    """autograd.grad(loss, masters): the graph was built on the twins. Hooks on the masters run."""
    plain = copy.deepcopy(pipe.module)
    weight = pipe.module[1].weight
    weight.register_hook(lambda gradient: 2 * gradient)
    (expected,) = torch.autograd.grad(plain(X).sum(), [plain[1].weight])
    with pipe.step():
        loss = pipe.module(X).sum()
        (gradient,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        assert torch.equal(gradient, 2 * expected)
        if torch.__version__ >= "2.14":  # older ones know no dictionaries
            assert torch.equal(torch.autograd.grad(loss, {"w": weight}, retain_graph=True)["w"], gradient)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(pipe.module[0](X).sum(), weight)
    assert resident_from_the_next_step_on(pipe) == ()
