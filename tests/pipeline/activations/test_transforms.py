"""Transforms of `torch.func`: hooks that step aside, and what stays on the device for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.func import grad, jacrev, jvp, vjp, vmap

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline._private import top_saved_tensor_hooks
from sp_lightning.pipeline.activations import transforms

from ...zoo.blocks import WIDTH, Block, Chain, rows


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    pipeline = Pipeline(Chain(Block() for _ in range(4)), "cpu", options=PipelineOptions(k=1, units=Block, debug=True))
    yield pipeline
    pipeline.detach()


def step(pipe: Pipeline, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with pipe.step():
        loss = function(pipe.module, *rows()).square().mean()
    loss.backward()
    pipe.module.zero_grad()


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: jvp(model, (x,), (x,))[1],
        lambda model, x: vmap(model)(x),
        lambda model, x: model(x) + grad(lambda y: y.sin().sum())(x),
        lambda model, x: vmap(jacrev(grad(lambda y: y.sin().sum())))(model(x)),
    ],
    ids=["jvp", "vmap", "grad-without-weights", "jacrev-without-weights"],
)
def test_units_stream(pipe: Pipeline, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for _ in range(3):
        step(pipe, function)
    assert pipe.stats.promotions == 0
    assert pipe.summary().units == 4


@pytest.mark.parametrize("differentiate", [grad, lambda function: lambda x: vjp(function, x)[0]], ids=["grad", "vjp"])
def test_only_units_that_it_calls_stay(
    pipe: Pipeline, differentiate: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    def function(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) + differentiate(lambda y: model.blocks[1](y).sum())(x)

    for _ in range(3):
        step(pipe, function)
    assert pipe.summary().units == 3


def test_hooks_are_back_after_a_transform_that_fails(pipe: Pipeline) -> None:
    def fail(x: Tensor) -> Tensor:
        assert top_saved_tensor_hooks() is None
        raise KeyError

    with pipe.step():
        before = top_saved_tensor_hooks()
        with pytest.raises(KeyError):
            grad(fail)(torch.ones(WIDTH))
        assert before is not None
        assert top_saved_tensor_hooks() == before
    assert top_saved_tensor_hooks() is None


def test_hooks_of_users_are_refused_as_in_plain_training(pipe: Pipeline) -> None:
    with (
        graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        pipe.step(),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        grad(lambda x: x.sum())(torch.ones(WIDTH))


def test_torch_is_as_before_without_a_pipeline() -> None:
    plain = graph.disable_saved_tensors_hooks
    pipelines = [Pipeline(nn.Sequential(Block(), Block()), "cpu", options=PipelineOptions(units=Block)) for _ in "ab"]
    for pipeline in pipelines:
        assert graph.disable_saved_tensors_hooks is not transforms._disable
        pipeline.detach()
    assert graph.disable_saved_tensors_hooks is plain
