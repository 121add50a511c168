"""Lowered weights that are used in a new way: in that step and from then on, numbers are those of plain autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

from sp_lightning.pipeline import Pipeline
from sp_lightning.pipeline.calls.guard import in_graphs
from sp_lightning.pipeline.options import Policy

from ...helpers import attached

Use = Callable[["Block", Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Calls its layer, and at some point begins to use the layer's weight in another way, too."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.use, self.also = nn.Linear(8, 8), use, False

    @property
    def w(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.use(self, x, y).tanh() if self.also else y * 0.9


def where_autocast_is_off(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.layer(y.float())


def without_a_graph(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.w.norm()
    return y / scale


def a_copy_of_its_own(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        copied = block.w.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(copied.square().sum(), copied)
    return y * gradient.norm()


def a_view_without_a_graph(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        view = block.w.t()
    return y * view.norm()


def out_of_autocasts_reach(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        product = torch.mm(x.float(), block.w, out=torch.empty(4, 8))
    return y + product


AS_IT_IS: dict[str, Use] = {
    "norm": lambda block, x, y: y / block.w.norm(dim=1),
    "norm, and the layer again": lambda block, x, y: block.layer(y / block.w.norm(dim=1)),
    "several": lambda block, x, y: y * block.w.float().norm(dim=1) * block.w.mean() * block.w[3:].t().std(),
    "a part twice": lambda block, x, y: y + F.linear(x, block.w[:4], block.layer.bias[:4]).repeat(1, 2),
    "a cast besides": lambda block, x, y: y + F.linear(x.bfloat16(), block.w.bfloat16()),
    "its dtype and device": lambda block, x, y: torch.sin(x.bfloat16().to(block.w)) + y,
    "a number": lambda block, x, y: y * block.w.abs().max().item(),
    "data": lambda block, x, y: y * block.w.data.norm(),
    "a tensor like it": lambda block, x, y: y + torch.full_like(block.w[0], 1.001),
    "a Python function of torch": lambda block, x, y: y * F.normalize(block.w)[0],
    "einsum that multiplies": lambda block, x, y: y * torch.einsum("bo,oi->bo", x, block.w),
    "a distribution": lambda block, x, y: y + torch.distributions.Normal(block.w[0], 0.1).scale,
    "a copy of its own": a_copy_of_its_own,
    "a view without a graph": a_view_without_a_graph,
    "out=": out_of_autocasts_reach,
    "autocast is off": where_autocast_is_off,
    "without a graph": without_a_graph,
}
SEVERAL_GRADIENTS: dict[str, Use] = {"the layer twice": lambda block, x, y: block.layer(y)}  # which add up in fp32
STILL_LOWERED: dict[str, Use] = {
    "its dtype": lambda block, x, y: torch.sin(x.to(block.w.dtype)) + y,
    "its size": lambda block, x, y: y / block.w.element_size(),
    "its shape": lambda block, x, y: y.view(-1, block.w.shape[0]) * len(block.w) / block.w.numel(),
}


@pytest.mark.parametrize(("policy", "cache"), [("keep", True), ("keep", False), ("recompute", False)])
@pytest.mark.parametrize("when", ["later", "in evaluation"])
@pytest.mark.parametrize("name", [*AS_IT_IS, *SEVERAL_GRADIENTS, *STILL_LOWERED])
def test_a_new_use(name: str, policy: Policy, when: str, cache: bool) -> None:
    """What autocast would not have cast gets the weight as it is, at once; it was rounded to bf16."""
    use = {**AS_IT_IS, **SEVERAL_GRADIENTS, **STILL_LOWERED}[name]
    lowered = assert_equal_to_plain(use, when, cache, policy)
    has_one_gradient = (cache or when == "in evaluation") and name in SEVERAL_GRADIENTS
    assert (lowered == 6) is (name in STILL_LOWERED or has_one_gradient)


@pytest.mark.parametrize("use", AS_IT_IS.values(), ids=AS_IT_IS)
def test_a_new_use_between_two_calls(use: Use) -> None:
    """Autocast has one cast for both, whose gradients add up in bf16."""
    assert_equal_to_plain(use, "later", cache=True, called=(0, 1, 0, 2, 1))


def test_a_dispatch_mode_around_everything() -> None:
    """In backward it hands on operations with the leaf, which is not a new use of it."""
    with FlopCounterMode(display=False):
        assert assert_equal_to_plain(lambda block, x, y: y, "later", cache=False) == 6


def assert_equal_to_plain(
    use: Use, when: str, cache: bool, policy: Policy = "keep", called: Sequence[int] = (0, 1, 2)
) -> int:
    """Tell a story plain and streamed; return how many weights are lowered in the end."""
    torch.manual_seed(0)
    blocks = [Block(use) for _ in range(3)]
    plain = nn.Sequential(*[blocks[number] for number in called])
    model = copy.deepcopy(plain)
    expected = story(plain, when, cache)
    with attached(model, k=1, k_prime=1, units=Block, activations=policy, debug=False) as pipeline:
        actual = story(model, when, cache)
        assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
        assert [index for index, pair in enumerate(zip(actual, expected, strict=True)) if not torch.equal(*pair)] == []
        return pipeline.summary().lowered


def story(model: nn.Sequential, when: str, cache: bool) -> list[Tensor]:
    """Train and evaluate in turns; from the second one on, blocks use their weight in another way."""
    optimizer, found = SGD(model.parameters(), 0.01), []
    for turn in range(3):
        for training in (True, False):
            for block in model:
                block.also = turn > 0 and training is (when == "later")
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.set_grad_enabled(training):
                output = model(torch.linspace(-1, 1, 32).view(4, 8))
            found.append(output.detach())
            if training:
                output.float().square().mean().backward()
                found += [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("penalized", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_gradients_that_are_asked_for(cache: bool, penalized: bool) -> None:
    """By `torch.autograd.grad`, as VQGAN does for its last layer, and by `backward(inputs=)`: in fp32."""

    def ask(model: nn.Sequential, pipeline: Pipeline | None) -> list[Tensor]:
        found = []
        for _ in range(4):
            for block in model:
                block.also = False
            with nullcontext() if pipeline is None else pipeline.step():
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                    loss = model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()
                asked = [parameter for parameter in model.parameters() if parameter.dim() == 2]
                if penalized:
                    loss = loss + sum(parameter.square().sum() for parameter in asked[1:])
                found += torch.autograd.grad(loss, asked, retain_graph=True)
                loss.backward(inputs=asked if pipeline is None else in_graphs(asked))
            found += [parameter.grad.clone() for parameter in asked]
            model.zero_grad()
        return found

    plain = nn.Sequential(*[Block(AS_IT_IS["norm"]) for _ in range(3)])
    model = copy.deepcopy(plain)
    expected = ask(plain, None)
    with attached(model, k=1, units=Block, debug=False) as pipeline:
        actual = ask(model, pipeline)
    assert [gradient.dtype for gradient in actual] == [torch.float32] * len(expected)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("within", [True, False])
def test_a_new_use_outside_of_a_unit_that_runs_again(within: bool) -> None:
    """Its second forward computes with what the first had, and the module tree has the weight as it is afterwards."""

    def train(model: nn.Sequential, pipeline: Pipeline | None) -> list[Tensor]:
        x, optimizer, found = torch.linspace(-1, 1, 32).view(4, 8), SGD(model.parameters(), 0.01), []
        for step in range(3):
            with nullcontext() if pipeline is None else pipeline.step():
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    loss = model(x).float().square().mean()
                    if step > 0:
                        loss = loss + F.linear(x, model[1].layer.weight).float().square().mean()
                if within:
                    loss.backward()
            if not within:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())]

    plain = nn.Sequential(*[Block(lambda block, x, y: y.sin().exp()) for _ in range(4)])
    for block in plain:
        block.also = True
    model = copy.deepcopy(plain)
    expected = train(plain, None)
    with attached(model, units=Block, activations="recompute") as pipeline:
        assert all(map(torch.equal, train(model, pipeline), expected))
        assert pipeline.stats.recomputed
