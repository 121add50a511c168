"""Quantized weights: which of them stream, and what becomes of them beside a plain step (the zoo has whole runs)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import parts_of
from sp_lightning.pipeline.units.finder import find_units

from ...helpers import attached
from ...zoo.blocks import WIDTH, Block, Chain, LoRALinear, chain
from ...zoo.quantized import Int8Linear, PackedLinear

Quantize = Callable[[nn.Linear], nn.Linear]
Change = Callable[[Chain, Chain], None]


def quantized(quantize: Quantize, length: int = 4) -> Chain:
    """Blocks, one layer of which is quantized, with a trained one beside it."""
    torch.manual_seed(0)
    model = chain(length)
    for block in model.blocks:
        block.up = LoRALinear(quantize(block.up))
    return model


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()


def weight_of(model: Chain, index: int = 1) -> Any:
    """The quantized weight of a block."""
    return model.blocks[index].up.base.weight


def gradient(model: nn.Module) -> Tensor:
    """What backward through the whole model gives the input."""
    x = inputs()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_one_that_is_trained_or_has_another_tensor_beside_it_lives_on_the_device() -> None:
    """As its gradient has its own class, too; or its memory another name, as bitsandbytes', which would not move."""
    trained, named = quantized(Int8Linear), quantized(PackedLinear)
    weight_of(trained).requires_grad_()
    weight_of(named).codes = weight_of(named).data
    for model in (trained, named):
        assert list(find_units(model, Block).unmanaged) == ["blocks.1.up.base.weight"]


class Statistic(nn.Parameter):
    """A frozen class of a user's own, which knows nothing of quantization."""


def test_one_of_another_class_lives_on_the_device_and_may_be_written_to() -> None:
    """It was called a quantized weight, to which a forward must not write."""

    class Averages(Block):
        def __init__(self) -> None:
            super().__init__()
            self.statistic = Statistic(torch.zeros(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.statistic.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return super().forward(x + self.statistic)

    model = Chain(Averages() for _ in range(3))
    plain = copy.deepcopy(model)
    with attached(model, units=Averages) as pipeline:
        assert len(pipeline.arrangement.unmanaged) == 3
        for _ in range(2):
            assert torch.equal(gradient(model), gradient(plain))
            assert isinstance(model.blocks[0].statistic, Statistic)
            assert torch.equal(model.blocks[2].statistic, plain.blocks[2].statistic)


def load(model: Chain, other: Chain) -> None:
    with torch.no_grad():
        for index, block in enumerate(other.blocks):
            for part in parts_of(block.up.base.weight):
                part.mul_(index)
    model.load_state_dict(other.state_dict())


def put_another_in_its_place(model: Chain, other: Chain) -> None:
    with torch.no_grad():
        for part in parts_of(weight_of(other)):
            part.neg_()
    model.blocks[1].up.base.weight = weight_of(other)


def convert(model: Chain, other: Chain) -> None:
    """Here to one scale for all rows."""
    for each in (model, other):
        weight_of(each).scale = weight_of(each).scale[:1].clone()


def give_other_memory(model: Chain, other: Chain) -> None:
    for each in (model, other):
        part, *_ = parts_of(weight_of(each))
        part.data = part.data.flip(0)


@pytest.mark.parametrize(
    ("quantize", "change"),
    [(Int8Linear, convert), *product([Int8Linear, PackedLinear], [load, put_another_in_its_place, give_other_memory])],
)
def test_what_changes_between_steps_is_used(quantize: Quantize, change: Change) -> None:
    """And streams as before."""
    model, other = quantized(quantize), quantized(quantize)
    with attached(model) as pipeline:
        gradient(model)
        change(model, other)
        actual = gradient(model)
        assert not pipeline.arrangement.unmanaged
    assert torch.equal(actual, gradient(other))


def test_one_that_is_unfrozen_moves_to_the_device() -> None:
    model = quantized(Int8Linear)
    with attached(model) as pipeline:
        gradient(model)
        weight_of(model).requires_grad_()
        with pipeline.step():
            gradient(model)
        assert list(pipeline.arrangement.unmanaged) == ["blocks.1.up.base.weight"]
    assert weight_of(model).grad is not None


@pytest.mark.parametrize("quantize", [Int8Linear, PackedLinear])
def test_a_forward_that_writes_to_one_is_refused(quantize: Quantize) -> None:
    def halve(block: nn.Module, _: Any) -> None:
        with torch.no_grad():
            parts_of(block.up.base.weight)[0].div_(2, rounding_mode="floor")

    model, other = quantized(quantize), quantized(quantize)
    handle = model.blocks[1].register_forward_pre_hook(halve)
    with attached(model, k=1):
        with pytest.raises(RuntimeError, match=r"wrote to the quantized weight 'blocks.1.up.base.weight'"):
            gradient(model)
        handle.remove()
        assert torch.equal(gradient(model), gradient(other))


def test_other_memory_is_refused() -> None:
    model = quantized(PackedLinear)

    def replace(block: nn.Module, _: Any) -> None:
        block.up.base.weight.data = block.up.base.weight.data.short()

    model.blocks[1].register_forward_pre_hook(replace)
    with attached(model), pytest.raises(RuntimeError, match=r"'blocks.1.up.base.weight', or gave it other memory"):
        gradient(model)
