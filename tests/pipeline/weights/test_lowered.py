"""Lowered weights that are used in a new way: in that step and from then on, numbers are those of plain autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

from sp_lightning.pipeline import Pipeline, PipelineOptions
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
        y = x if self.layer.bias is None else self.layer(x)
        return self.use(self, x, y).tanh() if self.also else y * 0.9


def where_autocast_is_off(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.layer(y.float())


def without_a_graph(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.w.norm()
    return y / scale


def changed_in_place(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        block.w.clamp_(-0.1, 0.1)
    return block.layer(x)


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
    if cache and name in SEVERAL_GRADIENTS:
        pytest.skip("in the step in which that begins, the gradients of some uses are rounded apart from the others'")
    lowered = assert_equal_to_plain(use, when, cache, policy)
    has_one_gradient = when == "in evaluation" and name in SEVERAL_GRADIENTS
    assert (lowered == 6) is (name in STILL_LOWERED or has_one_gradient)


def test_a_change_in_place() -> None:
    """Of a weight that is lowered until then."""
    assert_equal_to_plain(changed_in_place, "later", cache=False)


@pytest.mark.parametrize("when", ["always", "later"])
def test_a_change_of_data(when: str) -> None:
    """Of a weight that is watched, or lowered until then."""

    def clamped(block: Block, x: Tensor, y: Tensor) -> Tensor:
        block.w.data.clamp_(-0.1, 0.1)
        return block.layer(x)

    assert_equal_to_plain(clamped, when, cache=False)


def test_a_change_in_place_in_a_compiled_model() -> None:
    """Nothing is lowered there."""
    with torch.compiler.set_stance("default", force_backend="eager"):
        assert assert_equal_to_plain(changed_in_place, "later", cache=False, compiles=True) == 0


MATRIX_PRODUCTS: dict[str, tuple[Use, bool]] = {
    "matmul": (lambda block, x, y: x @ block.w, True),
    "a view": (lambda block, x, y: x @ block.w.mT, False),
    "parts": (lambda block, x, y: torch.cat([F.linear(x, part) for part in block.w.chunk(2)], 1), False),
    "converted": (lambda block, x, y: F.linear(x, block.w.to(x.dtype).float()), False),
    "cast": (lambda block, x, y: F.linear(x.bfloat16(), block.w.bfloat16()), False),
    "among tensors of another class": (
        lambda block, x, y: F.linear(x.as_subclass(Picture), block.w).as_subclass(Tensor),
        True,
    ),
}


class Picture(Tensor):
    """As torchvision's: it leaves operations to others that have classes it does not know."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", MATRIX_PRODUCTS)
def test_other_matrix_products(name: str, cache: bool) -> None:
    """They stay lowered from the first step on, if the weight itself is the operand."""
    use, is_lowered = MATRIX_PRODUCTS[name]
    assert assert_equal_to_plain(use, "always", cache) == (3 if is_lowered else 0)


def test_a_dispatch_mode_around_everything() -> None:
    """In backward it hands on operations with the leaf, which is not a new use of it."""
    with FlopCounterMode(display=False):
        assert assert_equal_to_plain(lambda block, x, y: y, "later", cache=False) == 6


def assert_equal_to_plain(use: Use, when: str, cache: bool, policy: Policy = "keep", compiles: bool = False) -> int:
    """Tell a story plain and streamed; return how many weights are lowered in the end."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(use) for _ in range(3)])
    if when == "always":
        for block in plain:
            block.layer.bias = None
    model = copy.deepcopy(plain)
    expected = story(plain, when, cache)
    options = PipelineOptions(k=1, k_prime=1, units=Block, activations=policy, compile=compiles)
    pipeline = Pipeline(model, "cpu", options=options)
    try:
        actual = story(model, when, cache)
        assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
        assert [index for index, pair in enumerate(zip(actual, expected, strict=True)) if not torch.equal(*pair)] == []
        return pipeline.summary().lowered
    finally:
        pipeline.detach()


def story(model: nn.Sequential, when: str, cache: bool) -> list[Tensor]:
    """Train and evaluate in turns; from the second one on, blocks use their weight in another way."""
    optimizer, found = SGD(model.parameters(), 0.01), []
    for turn in range(3):
        for training in (True, False):
            for block in model:
                block.also = when == "always" or (turn > 0 and training is (when == "later"))
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.set_grad_enabled(training):
                output = model(torch.linspace(-1, 1, 32).view(4, 8))
            found.append(output.detach())
            if training:
                output.float().square().mean().backward()
                found += [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("cache", [True, False])
def test_gradients_that_are_asked_for(cache: bool) -> None:
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
                found += torch.autograd.grad(loss, asked, retain_graph=True)
                loss.backward(inputs=asked if pipeline is None else pipeline.backward_inputs(asked))
            found += [parameter.grad.clone() for parameter in asked]
            model.zero_grad()
        return found

    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(AS_IT_IS["norm"]) for _ in range(3)])
    model = copy.deepcopy(plain)
    expected = ask(plain, None)
    with attached(model, k=1, units=Block, debug=False) as pipeline:
        actual = ask(model, pipeline)
    assert [gradient.dtype for gradient in actual] == [torch.float32] * len(expected)
    assert all(map(torch.equal, actual, expected))


class OfAnyLength(nn.Module):
    """A sequence whose length grows from one call to the next."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.length = kind(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.length += 1
        with torch.autocast("cpu", enabled=self.length != 3):  # which casts each step's weights on a CPU
            return self.layer(x.float().expand(self.length, 4, 8))[0][-1]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: OfAnyLength(nn.GRU), torch.linspace(-1, 1, 32).view(4, 8)),
        (lambda: OfAnyLength(nn.LSTM), torch.linspace(-1, 1, 32).view(4, 8)),
    ],
    ids=["GRU", "LSTM"],
)
def test_other_layers(build: Callable[[], nn.Module], x: Tensor, cache: bool) -> None:
    """Whose weights are cast again and again."""

    def train(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                found.append(model(x))
            found[-1].float().square().mean().backward()
        return [*found, *(parameter.grad for parameter in model.parameters())]

    torch.manual_seed(0)
    plain = nn.Sequential(*[build() for _ in range(3)])
    model = copy.deepcopy(plain)
    expected = train(plain)
    with attached(model, k=1, units=type(model[0]), debug=False):
        assert all(map(torch.equal, train(model), expected))
