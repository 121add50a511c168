"""What the finder makes of module trees: real architectures in their real shapes, and each rule on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Division

from ...zoo.blocks import Block, Chain, chain
from .parts import FULL_SIZE, in_full_size


def names(division: Division) -> list[str]:
    return [unit.name for unit in division.units]


def unit_of(division: Division, parameter: nn.Parameter) -> str:
    """The one unit that has a weight."""
    (name,) = [unit.name for unit in division.all_units() for weight in unit.weights if weight.master is parameter]
    return name


def check_division(model: nn.Module, division: Division) -> None:
    """What must hold for every tree."""
    held = [id(weight.master) for unit in division.all_units() for weight in unit.weights]
    held += [id(parameter) for parameter in division.unmanaged.values()]
    assert Counter(held) == Counter(id(p) for p in model.parameters()), "every weight is in exactly one place"
    assert all(weight.unit is unit for unit in division.all_units() for weight in unit.weights)
    assert all(unit.weights for unit in division.units)

    members = [member for unit in division.units for member in unit.members]
    assert [member.index for member in members] == list(range(len(members)))
    inside = [id(inner) for member in members for inner in member.module.modules()]
    assert len(inside) == len(set(inside)), "a module is entered through one member"
    order = {id(module): number for number, module in enumerate(model.modules())}
    first = [order[id(unit.members[0].module)] for unit in division.units]
    assert first == sorted(first), "units are expected in the order of the tree"

    modules = dict(model.named_modules(remove_duplicate=False))
    for member in [*members, *division.resident.members, *division.callers]:
        assert modules[member.name] is member.module
        assert all(entry.parameters[entry.key] is entry.weight.master for entry in member.every_entry)
    reached = {id(entry.weight) for member in [*members, *division.resident.members] for entry in member.every_entry}
    streamed = {id(weight) for unit in division.units for weight in unit.weights}
    assert streamed <= reached, "a streamed weight that no call brings"


@pytest.mark.parametrize("name", FULL_SIZE)
def test_real_models(name: str) -> None:
    """No weight is lost; golden_units.txt has their units, with sizes, and what is resident."""
    model = in_full_size(name)
    check_division(model, find_units(model))


def test_a_weight_shared_by_a_block_and_a_leaf_is_resident() -> None:
    """Blocks are not merged with something far away: that would be one unit of nearly everything."""
    model = chain(8)
    model.head = nn.Linear(12, 24)
    model.head.weight = model.blocks[0].up.weight
    division = find_units(model)
    check_division(model, division)
    assert unit_of(division, model.head.weight) == "resident"


def test_containers_without_a_forward_are_descended() -> None:
    """A ModuleList is never called, so it cannot be a unit, and neither can a bare nn.Module that holds others."""
    holder = nn.Module()
    holder.inner = nn.Module()
    holder.inner.layer = nn.Linear(16, 16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]), holder])
            self.by_name = nn.ModuleDict({"a": nn.Linear(16, 16)})

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = Model()
    division = find_units(model)
    check_division(model, division)
    assert names(division) == ["parts.0.0", "parts.0.1", "parts.1.inner.layer", "by_name.a"]


def test_a_block_that_is_too_large_is_descended() -> None:
    """As in a mixture of experts: the experts become units of their own."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(*[Mixture() for _ in range(8)])
    assert len(find_units(model).units) == 8
    block = sum(p.nbytes for p in model[0].parameters())
    division = find_units(model, device_bytes=3 * block)
    check_division(model, division)
    assert [name for name in names(division) if name.startswith("0.experts")] == [f"0.experts.{i}" for i in range(4)]
    assert max(sum(weight.master.nbytes for weight in unit.weights) for unit in division.units) <= block // 2


@pytest.mark.parametrize(
    "policy",
    [
        Block,
        "Block",
        f"{Block.__module__}.Block",
        ["NoSuchClass", Block, nn.Tanh],
        lambda name, module: name.startswith("blocks.") and name.count(".") == 1,
    ],
    ids=["class", "name", "full-name", "list", "callable"],
)
def test_policies(policy: Any) -> None:
    """Exactly the outermost modules that match, whatever their size, subclasses too; the rest is resident."""

    class Special(Block):
        pass

    model = Chain([Block(12, 200), Special(12, 24), Block(12, 3)])
    model.head = nn.Linear(12, 500)
    division = find_units(model, policy)
    check_division(model, division)
    assert names(division) == ["blocks.0", "blocks.1", "blocks.2"]
    assert unit_of(division, model.head.weight) == "resident"


@pytest.mark.parametrize("policy", ["Blok", [nn.Conv2d, nn.Tanh], nn.ModuleList, lambda name, module: False])
def test_a_policy_that_matches_nothing_that_could_stream(policy: Any) -> None:
    """All would be resident, and nobody would know. The message has the names that may have been meant."""
    model = chain(5)
    model.activation = nn.Tanh()
    with pytest.raises(ValueError, match=r"`units=.*matches no module of `Chain`.*Linear.*Block"):
        find_units(model, policy)


@pytest.mark.parametrize("policy", [None, Block])
@pytest.mark.parametrize("resident", [["blocks.1"], ["blocks.1.up", "blocks.2.up.weight"]])
def test_resident_names(policy: Any, resident: list[str]) -> None:
    """Modules and parameters; the others go on streaming."""
    model = chain(4)
    division = find_units(model, policy, resident)
    check_division(model, division)
    held = {name for name, p in model.named_parameters() if unit_of(division, p) == "resident"}
    assert held >= {name for name, _ in model.named_parameters() if name.startswith(tuple(resident))}
    assert unit_of(division, model.blocks[0].up.weight) == "blocks.0"
    with pytest.raises(ValueError, match=r"`resident` names 'blocks.9'.*Top-level modules: blocks"):
        find_units(model, policy, ["blocks.9"])


class Quantised(nn.Parameter):
    """A tensor subclass, as quantized weights are."""


@pytest.mark.parametrize(
    "replace",
    [
        lambda block: setattr(block.up, "weight", Quantised(torch.randn(24, 12))),
        lambda block: setattr(block.up, "weight", nn.Parameter(torch.randn(1, 12).expand(24, 12))),
        lambda block: setattr(block, "up", torch.jit.script(nn.Linear(12, 24))),
    ],
    ids=["subclass", "expanded", "scripted"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_weight_that_cannot_be_repointed_is_unmanaged(replace: Callable[[Block], None]) -> None:
    """It lives on the device; the rest of its block streams."""
    model = chain(3)
    replace(model.blocks[1])
    division = find_units(model, Block)
    check_division(model, division)
    assert "blocks.1.up.weight" in division.unmanaged
    assert set(division.unmanaged) <= {"blocks.1.up.weight", "blocks.1.up.bias"}
    assert unit_of(division, model.blocks[1].down.weight) == "blocks.1"


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_block_and_its_compiled_self_are_one_unit(compiled_first: bool) -> None:
    """Each way to call it enters the unit."""
    plain = chain(4)
    parts = {"compiled": nn.ModuleList(torch.compile(block) for block in plain.blocks), "plain": plain}
    model = nn.ModuleDict(parts if compiled_first else dict(reversed(parts.items())))
    for policy in (None, Block):
        division = find_units(model, policy)
        members = [{id(member.module) for member in unit.members} for unit in division.units]
        assert members == [{id(a), id(b)} for a, b in zip(*(parts["compiled"], plain.blocks), strict=True)]
        assert not division.resident.weights
