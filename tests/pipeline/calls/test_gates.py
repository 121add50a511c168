"""Gates: a module that is one looks like a plain one, and its class may change meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sp_lightning.pipeline.calls.gates import install_gate, remove_gate
from sp_lightning.pipeline.units.unit import Member


class Keeper:
    """A pipeline that writes down whose calls it saw."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(member.name)
        return forward(*args, **kwargs)


class Gated:
    """A module that is a gate until the test ends."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.members: list[Member] = []

    def __call__(self, module: nn.Module, name: str = "unit") -> nn.Module:
        self.members.append(Member(name, module, None))
        install_gate(self.members[-1], self.keeper)
        return module

    def remove(self) -> None:
        for member in self.members:
            remove_gate(member)


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.remove()


def test_a_gate_looks_like_the_plain_class(gated: Gated) -> None:
    plain = nn.Linear(2, 3)
    gate = gated(nn.Linear(2, 3))
    assert isinstance(gate, nn.Linear)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(gate), attribute) == getattr(type(plain), attribute)
    assert repr(gate) == repr(plain)
    assert gate.__class__ is nn.Linear
    assert type(gate) is not nn.Linear
    assert type(gated(nn.Linear(3, 3))) is type(gate), "one class for each plain class"
    assert type(copy.copy(gate)) is nn.Linear
    gated.remove()
    assert type(gate) is nn.Linear
    gated.remove()
    assert type(gate) is nn.Linear


def test_super_of_the_class_of_self(gated: Gated) -> None:
    """Instead of `super()`, which works as long as nobody derives from the class."""

    class Derived(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super(self.__class__, self).forward(x)

    module = Derived(2, 2)
    expected = module(torch.ones(1, 2))
    assert torch.equal(gated(module)(torch.ones(1, 2)), expected)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("before", [True, False], ids=["before", "while-attached"])
def test_a_parametrization_survives_detach(gated: Gated, before: bool) -> None:
    """torch puts a subclass of its own on the module: ours is taken out from under it, its stays."""
    module = nn.Linear(2, 2, bias=False)
    weight = module.weight.detach().clone()
    if before:
        parametrize.register_parametrization(module, "weight", Doubled())
    gated(module)
    if not before:
        parametrize.register_parametrization(module, "weight", Doubled())
    for _ in range(2):
        assert torch.equal(module.weight, 2 * weight)
        assert torch.equal(module(torch.eye(2)), 2 * weight.t())
        assert parametrize.is_parametrized(module, "weight")
        gated.remove()
    assert not hasattr(module, "_superpipeline_plain")
    parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module.weight, 2 * weight)


@pytest.mark.parametrize("remove_while_attached", [True, False])
def test_parametrizations_are_removed_one_by_one(gated: Gated, remove_while_attached: bool) -> None:
    """torch deletes their properties from the module's class, and at the end goes back to the class below it."""
    module = nn.Linear(2, 2)
    expected = nn.functional.linear(torch.eye(2), 2 * module.weight, 2 * module.bias).detach()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(module, name, Doubled())
    for _ in range(3):
        gated.remove()
        gated(module)
    assert not hasattr(copy.deepcopy(module), "_superpipeline_plain")
    if not remove_while_attached:
        gated.remove()
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(module, name)
        assert torch.equal(module(torch.eye(2)), expected)
    assert len(gated.keeper.calls) == 2 * remove_while_attached
    gated.remove()
    assert type(module) is nn.Linear


def test_a_graph_module_may_be_recompiled(gated: Gated) -> None:
    """It writes `__call__` into its class, as torchvision's feature extractors do whenever they change their mode."""
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gate = gated(traced)
    for node in gate.graph.nodes:
        if node.op == "output":
            node.args = (node.args[0].args[0],)  # without the ReLU
    gate.recompile()
    x = torch.ones(1, 2)
    assert torch.equal(gate(x), gate.get_submodule("0")(x))
    assert gated.keeper.calls == ["unit"]
    gated.remove()
    assert torch.equal(gate(x), gate.get_submodule("0")(x))
    assert gated.keeper.calls == ["unit"]
