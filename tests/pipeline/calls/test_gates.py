"""Gates: a module that is one looks like a plain one, and its class may change meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...helpers import attached


def test_a_gate_looks_like_the_plain_class() -> None:
    plain = nn.Linear(2, 3)
    with attached(model := nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), units=nn.Linear) as pipe:
        gate, other = model
        assert isinstance(gate, nn.Linear)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(gate), attribute) == getattr(type(plain), attribute)
        assert repr(gate) == repr(plain)
        assert gate.__class__ is nn.Linear
        assert type(gate) is not nn.Linear
        assert type(other) is type(gate), "one class for each plain class"
        assert type(copy.copy(gate)) is nn.Linear
        for _ in range(2):
            pipe.detach()
            assert type(gate) is nn.Linear


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("removed", ["attached", "detached"])
@pytest.mark.parametrize("made", ["before", "attached"])
def test_parametrizations_come_and_go(made: str, removed: str) -> None:
    """torch puts a subclass of its own on the module, whose properties it deletes one by one: ours goes, its stays."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module, names = model[0], ("weight", "bias")
    expected = nn.functional.linear(torch.eye(2), 2 * module.weight, 2 * module.bias).detach()

    def parametrized() -> None:
        for name in names:
            parametrize.register_parametrization(module, name, Doubled())

    def plain_again() -> None:
        for name in names:
            parametrize.remove_parametrizations(module, name)
            assert torch.equal(module(torch.eye(2)), expected)

    if made == "before":
        parametrized()
    for number in range(2):
        with attached(model, units=nn.Linear) as pipe:
            if made == "attached" and not number:
                parametrized()
            assert torch.equal(module(torch.eye(2)), expected)
            assert parametrize.is_parametrized(module, "weight")
            assert torch.equal(copy.deepcopy(module)(torch.eye(2)), expected)
            if removed == "attached" and number:
                plain_again()
            assert pipe.stats.loads > 0
        assert torch.equal(module(torch.eye(2)), expected)
    if removed == "detached":
        plain_again()
    assert type(module) is nn.Linear


def test_a_graph_module_may_be_recompiled() -> None:
    """It writes `__call__` into its class, as torchvision's feature extractors do whenever they change their mode."""
    gate = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.ones(1, 2)
    with attached(nn.Sequential(gate, nn.Linear(2, 2)), units=torch.fx.GraphModule) as pipe:
        for node in gate.graph.nodes:
            if node.op == "output":
                node.args = (node.args[0].args[0],)  # without the ReLU
        gate.recompile()
        y = gate(x)
        assert pipe.stats.loads == 1
    layer = gate.get_submodule("0")
    assert torch.equal(y, layer(x))
    assert torch.equal(gate(x), y)
