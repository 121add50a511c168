"""Members: the modules whose calls enter a unit, and those whose calls only open a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from sp_lightning.pipeline.torch_private import without_compile
from sp_lightning.pipeline.units.tree import Tree, is_called
from sp_lightning.pipeline.weights.units import Entry, Member, Unit


def make_member(
    tree: Tree, name: str, module: nn.Module, unit: Unit, inner: Iterable[nn.Module] | None = None
) -> Member:
    """Make a member, with the places in which its call may find weights: in itself and below, or in `inner` modules."""
    member = Member(name, module, unit)
    for owner in module.modules() if inner is None else inner:
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in tree.weights:
                member.entries.append(Entry(owner._parameters, key, tree.weights[id(parameter)]))
    return member


def add_remaining_members(tree: Tree, units: Sequence[Unit], resident: Unit) -> list[Member]:
    """Make members of what is outside of units: of whole subtrees without units, and of each module around units.

    Returns:
        Members without a unit: modules around units, whose calls open a step.
    """
    walk = _Walk(tree, units, resident)
    walk.visit("", tree.root)
    return walk.callers


def note_special_cases(members: Iterable[Member], callers: Iterable[Member]) -> None:
    """Note which modules of torch look for weights elsewhere than in `_parameters`.

    RNNs compute with `_flat_weights`, a list of their own. `nn.TransformerEncoder` inspects its first layer's weights
    to choose a fast path.
    """
    by_module = {}
    for member in members:
        by_module[id(member.module)] = member
        by_master = {id(entry.weight.master): entry.weight for entry in member.entries}
        for module in member.module.modules():
            if isinstance(module, nn.RNNBase) and all(id(p) in by_master for p in module._flat_weights):
                member.recurrent.append((module, [by_master[id(p)] for p in module._flat_weights]))
    for caller in callers:
        encoder = without_compile(caller.module)
        if isinstance(encoder, nn.TransformerEncoder) and len(encoder.layers):
            caller.looks_into = by_module.get(id(encoder.layers[0]))


class _Walk:
    """A walk down a tree that makes members of what is outside of units."""

    def __init__(self, tree: Tree, units: Sequence[Unit], resident: Unit) -> None:
        members = [member for unit in [*units, resident] for member in unit.members]
        self.callers: list[Member] = []
        self._tree = tree
        self._resident = resident
        self._have_gates = {id(member.module) for member in members}
        self._unit_around = {id(inner): member.unit for member in members for inner in member.module.modules()}
        self._covered = set(self._unit_around)

    def visit(self, name: str, module: nn.Module) -> None:
        inner = without_compile(module)
        if id(module) in self._covered or id(inner) in self._unit_around:
            self._add_inside_of_unit(name, module, self._unit_around.get(id(inner)))
            return
        around_units = any(id(part) in self._unit_around for part in module.modules())
        if is_called(module) and not isinstance(module, torch.jit.ScriptModule):
            whole = not around_units and module is not self._tree.root and self._tree.may_be_member(module)
            self._covered.update(id(part) for part in (module.modules() if whole else [module]))
            member = make_member(self._tree, name, module, self._resident, None if whole else [inner])
            if member.entries:
                self._resident.members.append(member)
            elif around_units or module is self._tree.root:
                member.unit = None
                self.callers.append(member)
            if whole:
                return
        for child_name, child in module.named_children():
            self.visit(f"{name}.{child_name}" if name else child_name, child)

    def _add_inside_of_unit(self, name: str, module: nn.Module, unit: Unit | None) -> None:
        """Add a member for a part of a unit that is reached from outside of it, and so may be called from there."""
        if id(module) not in self._have_gates and unit is not None and is_called(module):
            self._have_gates.add(id(module))
            unit.members.append(make_member(self._tree, name, module, unit))
