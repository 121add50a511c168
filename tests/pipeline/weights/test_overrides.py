"""Functions of torch's that are made to ask the classes of weights are as ever for everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.leaf import _make_parameters_of


class Loud(nn.Parameter):
    """A parameter that does not want to be touched."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_parameters_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of tensors, and of a class that torch does not know."""
    weight = torch.ones(2)
    monkeypatch.setattr(nn.Parameter, "__new__", nn.Parameter.__new__)  # and puts it back afterwards
    _make_parameters_of([Loud], [])
    with without_torch_function():
        made = [nn.Parameter(of) for of in (weight, nn.Parameter(weight), weight.as_subclass(Loud))]
    assert {(type(parameter), parameter.data_ptr()) for parameter in made} == {(nn.Parameter, weight.data_ptr())}
    assert not nn.Parameter(data=weight, requires_grad=False).requires_grad
    assert nn.Parameter().numel() == 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def uses_all(x: Tensor) -> Tensor:
    return Doubled.apply(x + torch.tensor(3.0) + torch.as_tensor(2.0) + x.new_tensor(1.0))


def test_compiled_code_has_no_graph_break_there() -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(torch.compile(uses_all, backend="eager", fullgraph=True)(x), uses_all(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_code_finds_them() -> None:
    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x + torch.tensor(1.0) + torch.as_tensor(2)

    assert scripted(torch.ones(1)) == 4


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_classes_of_others_are_not_asked() -> None:
    loud = torch.ones(2).as_subclass(Loud)
    for made in (torch.tensor(loud), torch.as_tensor(loud, dtype=torch.float64), torch.ones(1).new_tensor(loud)):
        assert type(made) is Tensor


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_a_default_device_holds_for_them(make: Any) -> None:
    with torch.device("meta"):
        assert getattr(torch, make.__name__)([1.0]).device.type == "meta"
