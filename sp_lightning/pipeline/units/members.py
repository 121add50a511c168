"""Members: the modules whose calls enter a unit, and those whose calls only open a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import nn

from sp_lightning.pipeline.torch_private import without_compile
from sp_lightning.pipeline.units.tree import Tree, is_called
from sp_lightning.pipeline.units.unit import Division, Entry, Member, Unit
from sp_lightning.pipeline.weights.weight import Weight


def make_division(
    tree: Tree,
    groups: Sequence[Sequence[nn.Module]],
    resident_weights: Set[Weight],
) -> Division:
    """Make a unit of each group of modules, without its resident weights, and members of all modules with a call."""
    resident = Unit("resident", resident=True)
    units: list[Unit] = []
    for group in groups:
        unit = _make_unit(tree, group, resident_weights)
        if unit.weights:
            units.append(unit)
        else:  # its modules are called as before
            resident.members += unit.members
    streamed = {weight for unit in units for weight in unit.weights}
    resident.weights = [weight for weight in tree.weights.values() if weight not in streamed]
    for member in resident.members:
        member.unit = resident
    for unit in [*units, resident]:
        for weight in unit.weights:
            weight.unit = unit
    _add_other_entrances(tree, [*units, resident])
    callers = _add_modules_outside(tree, units, resident)
    streamed_members = [member for unit in units for member in unit.members]
    for index, member in enumerate(streamed_members):
        assert member.unit is not None
        member.index = index
        member.is_streamed = True
        member.unit_name = member.unit.name
    return Division(units, resident, streamed_members, callers, tree.unmanaged)


def _make_unit(tree: Tree, group: Sequence[nn.Module], resident_weights: Set[Weight]) -> Unit:
    names = [tree.names[id(module)] for module in group]
    unit = Unit(names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}")
    unit.members = [_make_member(tree, module, unit, module.modules()) for module in group]
    weights = dict.fromkeys(entry.weight for member in unit.members for entry in member.every_entry)
    unit.weights = [weight for weight in weights if weight not in resident_weights]
    # the weights that an optimizer updates are sent in one copy
    unit.weights.sort(key=lambda weight: weight.master.requires_grad)
    return unit


def _make_member(
    tree: Tree,
    module: nn.Module,
    unit: Unit | None,
    owners: Iterable[nn.Module],
) -> Member:
    """Make a member whose call may use the weights that `owners` have themselves."""
    member = Member(tree.names[id(module)], module, unit)
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if id(parameter) in tree.weights:
                member.every_entry.append(Entry(owner._parameters, name, tree.weights[id(parameter)]))
        if isinstance(owner, nn.RNNBase):
            managed = [tree.weights[id(weight)] for weight in owner._flat_weights if id(weight) in tree.weights]
            if len(managed) == len(owner._flat_weights):
                member.recurrent.append((owner, managed))
    return member


def _add_other_entrances(tree: Tree, units: Sequence[Unit]) -> None:
    """Make members of other parts of units that modules around units may call: a compiled self, or a module inside."""
    unit_around = {id(inner): unit for unit in units for member in unit.members for inner in member.module.modules()}
    entrances = {id(member.module) for unit in units for member in unit.members}
    for module in tree.root.modules():
        if id(without_compile(module)) in unit_around:
            continue
        for child in module.children():
            unit = unit_around.get(id(without_compile(child)))
            if unit is not None and id(child) not in entrances and is_called(child):
                entrances.add(id(child))
                unit.members.append(_make_member(tree, child, unit, child.modules()))


def _add_modules_outside(tree: Tree, units: Sequence[Unit], resident: Unit) -> list[Member]:
    """Make resident members of modules outside of units that may use weights: whole subtrees, and modules around units.

    Modules around units that own no weights are returned: they have no unit, and their calls open a step.
    """
    entered = [member.module for unit in (*units, resident) for member in unit.members]
    in_units = {id(inner) for module in entered for inner in module.modules()}
    covered = set(in_units)
    callers: list[Member] = []
    for module in tree.root.modules():
        if id(module) in covered or not is_called(module) or isinstance(module, torch.jit.ScriptModule):
            continue
        owners: Iterable[nn.Module] = [without_compile(module)]
        is_around_units = module is tree.root or any(id(inner) in in_units for inner in module.modules())
        if not is_around_units and tree.may_be_member(module):
            owners = list(module.modules())
            covered.update(map(id, owners))
        member = _make_member(tree, module, resident, owners)
        if member.every_entry:
            resident.members.append(member)
        elif is_around_units:
            callers.append(_make_member(tree, module, None, _looked_into(without_compile(module), entered)))
    return callers


def _looked_into(module: nn.Module, entered: Sequence[nn.Module]) -> Iterable[nn.Module]:
    """Return the modules whose weights a module around units looks at, to choose a fast path: it must see twins."""
    if isinstance(module, nn.TransformerEncoder):
        first_layer: nn.Module | None = next(iter(module.layers), None)
        if first_layer is not None and any(first_layer is other for other in entered):
            return first_layer.modules()
    return ()
