"""A weight has two Parameters, on the host and on the device; whichever a program has, whenever, it is one weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from .helpers import Run, assert_same_story, attached, note_state, slow_host
from .zoo.blocks import WIDTH, Block, Chain, StashOnContext


class HoldsWeights(Block):
    """Holds its weights since it was made, as clippers and moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 24).requires_grad_(False)
        self.pairs = [*zip(self.teacher.parameters(), self.up.parameters(), strict=True)]


class AveragesData(HoldsWeights):
    def forward(self, x: Tensor) -> Tensor:
        for average, weight in self.pairs:
            average.data.mul_(0.5).add_(weight.data, alpha=0.5)
        return super().forward(x) + self.teacher(x).mean()


class ClampsWithoutGraph(HoldsWeights):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _, weight in self.pairs:
                weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ComputesWithHeld(HoldsWeights):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.pairs[0][1].norm()


class KeepsLeaf(Block):
    """Uses a leaf that it was given in its first forward, for good."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.__dict__["kept"] = self.up.weight
        return super().forward(x) + F.linear(x, self.kept).mean()


class GivesSecondName(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.again = self.up.weight
        return super().forward(x) + F.linear(x, self.again).mean()


class TiesInForward(Block):
    """As old code does."""

    def __init__(self) -> None:
        super().__init__(hidden=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.down.weight = self.up.weight
        return super().forward(x)


class MakesParameter(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, nn.Parameter(self.up.weight, requires_grad=False)).mean()


class RegistersHook(Block):
    """Hooks belong to the weight, also when it comes to stay on the device."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.up.weight.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


class CopiesPastClass(Block):
    """Factories do not ask the classes of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        copies = torch.tensor(self.up.bias), torch.as_tensor(self.up.bias), x.new_tensor(self.up.bias)
        return super().forward(x) * sum(copy.sum() for copy in copies)


class Aside(Block):
    """A custom Function keeps the weight on its context, and what it returns goes by an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.output = super().forward(x) + StashOnContext.apply(x, self.up.weight).mean()
        return torch.zeros(())


class GradWithinNoGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x) + StashOnContext.apply(x, self.up.weight).mean()


class Cubed(torch.autograd.Function):
    """Of a weight alone: its gradient has the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight.float() ** 3).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] ** 2 / 3


class FunctionOfWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Cubed.apply(self.up.weight)


class CheckpointOfWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + checkpoint(lambda weight: (weight**3).mean(), self.up.weight, use_reentrant=True)


BLOCKS = [
    AveragesData, ClampsWithoutGraph, ComputesWithHeld, KeepsLeaf, GivesSecondName, TiesInForward, MakesParameter,
    RegistersHook, CopiesPastClass, FunctionOfWeight, CheckpointOfWeight,
]  # fmt: skip


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def losses_aside(model: Chain, x: Tensor) -> Tensor:
    for block in model.blocks:
        block(x)
        x = block.output
    return x.square().mean()


def losses_within_no_grad(model: Chain, x: Tensor) -> Tensor:
    with torch.no_grad():
        for block in model.blocks:
            x = block(x)
    return x.square().mean()


def read_first(model: Chain, x: Tensor) -> Tensor:
    """What is read outside of its module gets memory of its own in this step; the module writes to that."""
    with torch.no_grad():
        norm = model.blocks[1].up.weight.norm()
    return losses(model, x) * norm


def read_alias(model: Chain, x: Tensor) -> Tensor:
    """An alias shows what the forward has written."""
    alias = model.blocks[1].up.weight.detach()
    loss = losses(model, x)
    return loss * (1 + alias.norm().item())


def penalized(model: Chain, x: Tensor) -> Tensor:
    """Weights are used once more when their modules are left."""
    return losses(model, x) + 0.01 * sum((weight.square().sum() for weight in model.parameters()), torch.zeros(()))


def train(run: Run, loss_of: Callable[[Any, Tensor], Tensor] = losses, autocast: bool = False) -> None:
    optimizer = SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        with run.step(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(run.model, run.rows(number))
        with run.step():
            loss.backward()
        run.note(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
        note_state(run.trace, f"step {number}", run.model, [optimizer])


def chain_of(kind: type[Block]) -> nn.Module:
    return Chain([kind() for _ in range(4)])


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*so its forward cannot run a second time"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:torch.asarray"),
]


@pytest.mark.parametrize(("activations", "autocast"), [("keep", False), ("recompute", False), ("keep", True)])
@pytest.mark.parametrize("block", BLOCKS)
def test_in_its_module(block: type[Block], activations: str, autocast: bool) -> None:
    """Under autocast most weights are sent lowered, from the first step on."""
    assert_same_story(partial(train, autocast=autocast), partial(chain_of, block), activations=activations)


@pytest.mark.parametrize("loss_of", [read_first, read_alias])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("block", [AveragesData, ClampsWithoutGraph])
def test_outside_of_its_module(block: type[Block], autocast: bool, loss_of: Callable[..., Tensor]) -> None:
    assert_same_story(partial(train, loss_of=loss_of, autocast=autocast), partial(chain_of, block))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_after_its_module_under_autocast(activations: str) -> None:
    """Second forwards compute with what the first ones had."""
    assert_same_story(
        partial(train, loss_of=penalized, autocast=True), partial(chain_of, Block), activations=activations
    )


@pytest.mark.parametrize(("block", "loss_of"), [(Aside, losses_aside), (GradWithinNoGrad, losses_within_no_grad)])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_what_a_custom_function_keeps(block: type[Block], loss_of: Callable[..., Tensor], activations: str) -> None:
    """Wherever its output goes, backward has the weight."""
    assert_same_story(partial(train, loss_of=loss_of), partial(chain_of, block), activations=activations)


@pytest.mark.parametrize("copy", [torch.tensor, torch.as_tensor, torch.asarray, torch.ones(1).new_tensor])
def test_factories_wait_for_the_step(copy: Callable[[Tensor], Tensor]) -> None:
    def story(run: Run) -> None:
        optimizer = AdamW(run.model.parameters(), lr=0.1)
        for number in range(3):
            run.model(run.rows(number)).sum().backward()
            optimizer.step()
            run.note(f"copy {number}", copy(run.model.blocks[0].up.bias) * 1)
            optimizer.zero_grad()

    with slow_host():
        assert_same_story(story, partial(chain_of, Block))


def test_swapping_tensors_between_steps() -> None:
    def story(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), lr=0.1)
        for number in range(3):
            run.normal_step(f"step {number}", optimizer, seed=number)
            weight = run.model.blocks[0].up.weight
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.5))

    assert_same_story(story, partial(chain_of, Block))


class ReplacesByAlias(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight = nn.Parameter(self.up.weight.data, requires_grad=False)
        return super().forward(x)


class SetsMemory(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.detach()  # an alias of its own may be set, the weight may not
        self.up.weight.set_(torch.ones(24, WIDTH))
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (ReplacesByAlias, r"gives Linear a Parameter 'weight' over the memory of weight 'blocks.0.up.weight'.*clone"),
        (SetsMemory, r"gives weight 'blocks.0.up.weight' other memory.*Write into it"),
    ],
)
def test_memory_that_is_given_away_is_refused(block: type[Block], says: str) -> None:
    with attached(model := chain_of(block)), torch.no_grad(), pytest.raises(RuntimeError, match=says):
        model(Run.rows(0))
