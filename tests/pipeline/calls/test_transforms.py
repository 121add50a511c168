"""Transforms of `torch.func`, which cannot run streamed units: an error says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

from sp_lightning.pipeline import Pipeline, PipelineOptions

from ...zoo.blocks import WIDTH, Block, Chain, rows

DIFFERENTIATING = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(x)),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
}
OTHERS = {"jvp": lambda f, x: jvp(f, (x,), (x,))[1], "vmap": lambda f, x: vmap(f)(x)}
Transform = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    options = PipelineOptions(k=1, units=Block, resident=["blocks.3"])
    pipeline = Pipeline(Chain(Block() for _ in range(4)), "cpu", options=options)
    yield pipeline
    pipeline.detach()


def trains(pipe: Pipeline) -> bool:
    """Whether the next step is a right one."""
    pipe.module(*rows()).square().mean().backward()
    trained = all(parameter.grad is not None for parameter in pipe.module.parameters())
    pipe.module.zero_grad()
    return trained


@pytest.mark.parametrize("transform", DIFFERENTIATING.values(), ids=DIFFERENTIATING)
@pytest.mark.parametrize("of", ["a unit", "no weights"])
def test_derivatives_in_a_step(transform: Transform, of: str, pipe: Pipeline) -> None:
    """Torch refuses them under saved-tensor hooks, which a step has."""
    function = pipe.module.blocks[1] if of == "a unit" else torch.sin
    with pytest.raises(RuntimeError, match=r"^torch.func.*saved tensor hooks"), pipe.step():
        transform(function, *rows())
    assert trains(pipe)


@pytest.mark.parametrize("transform", [*DIFFERENTIATING.values(), *OTHERS.values()], ids=[*DIFFERENTIATING, *OTHERS])
@pytest.mark.parametrize("whole", [True, False])
def test_calls_of_the_module_within_a_transform(transform: Transform, whole: bool, pipe: Pipeline) -> None:
    """Without a step around them."""
    with pytest.raises(RuntimeError, match=r"whose weights are streamed, is called within a transform.*`resident=`"):
        transform(pipe.module if whole else pipe.module.blocks[1], *rows())
    assert trains(pipe)


@pytest.mark.parametrize("transform", OTHERS.values(), ids=OTHERS)
def test_units_and_resident_modules_in_a_step(transform: Transform, pipe: Pipeline) -> None:
    x, resident = rows()[0], pipe.module.blocks[3]
    with pytest.raises(RuntimeError, match=r"'blocks.1', whose weights are streamed.*`resident=`"), pipe.step():
        transform(pipe.module.blocks[1], x)
    first = next(resident.parameters())
    found = []
    for _ in range(2):
        with pipe.step():
            transform(resident, x).square().mean().backward()
        found.append(first.grad.clone())
        pipe.module.zero_grad()
    assert trains(pipe)
    pipe.detach()
    transform(resident, x).square().mean().backward()
    assert all(torch.equal(each, first.grad) for each in found)


def test_other_weights_in_place_of_a_modules_own_are_no_transform(pipe: Pipeline) -> None:
    others = {name: torch.ones_like(weight) for name, weight in pipe.module.named_parameters()}
    with pipe.step():
        y = functional_call(pipe.module, others, torch.ones(2, WIDTH))
    assert torch.equal(y[0], y[1])
    assert trains(pipe)
