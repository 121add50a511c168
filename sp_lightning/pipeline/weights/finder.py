"""From a module tree to units: which modules stream, which weights stay on the device.

Units are found in any tree:

1. children of lists (`ModuleList`, `Sequential`, `ModuleDict`) are blocks; a block too large is descended into,
2. outside of lists, small modules stay whole and large ones are descended into, down to leaves (embeddings, heads),
3. neighbours are joined while the sum stays below the size of a typical unit, so sizes are balanced (VGG, ResNet),
4. what is left (small leaves, parameters that a module with units in it owns itself) is resident.

What `torch.compile(module)` returns is looked through, and is the member in place of its module: it is what is called.

Parameters that several modules share are found by identity and belong to one place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sp_lightning.pipeline._private import without_compile
from sp_lightning.pipeline.options import UnitPolicy
from sp_lightning.pipeline.weights.parameters import (
    check_parameter,
    is_manageable,
    named_own_parameters,
    tied_by_memory,
)
from sp_lightning.pipeline.weights.units import Division, Member, Place, Unit
from sp_lightning.pipeline.weights.weight import Weight

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_READS_ITS_CHILDREN = (nn.MultiheadAttention,)  # uses `out_proj.weight` without calling `out_proj`
_TYPICAL_COUNT = 12  # neighbours are joined up to this fraction of the model
_SMALL_LEAF = 50  # leaves below this fraction of the model are not worth streaming on their own,
_SMALL_BYTES = 256 << 20  # unless they are larger than this: a large model's embedding would fill a small device


def find_units(
    root: nn.Module,
    policy: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    max_unit_bytes: int | None = None,
    split: Sequence[nn.Module] = (),
    on_meta: bool = False,
) -> Division:
    """Find the units of a module tree.

    Args:
        root: The module.
        policy: The user's idea of a unit; `None` finds units by the rules at the top of this file.
        resident: Names of modules and parameters that stay on the device.
        max_unit_bytes: Blocks above this size are descended into.
        split: Modules that turned out not to be called themselves, to be descended into.
        on_meta: Whether parameters may be on the meta device, because nobody is going to compute with them.

    Raises:
        ValueError: If there is nothing to stream, a name or policy matches nothing, or a parameter is not on the CPU.
    """
    return _Finder(root, policy, resident, max_unit_bytes, split, on_meta).find()


class _Finder:
    def __init__(
        self,
        root: nn.Module,
        policy: UnitPolicy | None,
        resident: Sequence[str],
        max_unit_bytes: int | None,
        split: Sequence[nn.Module],
        on_meta: bool,
    ) -> None:
        self.root = root
        self.on_meta = on_meta
        self.policy = policy
        self.max_unit_bytes = max_unit_bytes
        self.split = {id(module) for module in split}
        self.weights: dict[int, Weight] = {}
        self.unmanaged: dict[str, nn.Parameter] = {}
        self._collect_weights()
        self.resident_modules, self.resident_weights = self._named_resident(resident)
        self.sizes = {id(module): self._subtree_bytes(module) for module in root.modules()}
        self.total = self.sizes[id(root)]

    def find(self) -> Division:
        atoms = self._atoms()
        shared_atoms, shared_weights = self._sort_out_sharing(atoms)
        self.resident_weights |= shared_weights
        units = [self._make_unit(part) for part in self._join(self._merge_shared(atoms, shared_atoms))]
        emptied = [member for unit in units if not unit.weights for member in unit.members]
        units = [unit for unit in units if unit.weights]
        taken = {id(weight) for unit in units for weight in unit.weights}
        resident = Unit("resident", resident=True)
        resident.weights = [weight for weight in self.weights.values() if id(weight) not in taken]
        for member in emptied:  # all that they have is shared and resident, but their calls must be noticed
            member.unit = resident
            resident.members.append(member)
        callers = self._remaining_members(units, resident)
        for unit in [*units, resident]:
            for weight in unit.weights:
                weight.unit = unit
        members = [member for unit in units for member in unit.members]
        for member in [*members, *resident.members]:
            self._find_recurrent(member)
        by_module = {id(member.module): member for member in [*members, *resident.members]}
        for member in callers:
            encoder = without_compile(member.module)
            if isinstance(encoder, nn.TransformerEncoder) and len(encoder.layers):
                member.looks_into = by_module.get(id(encoder.layers[0]))
        division = Division(units, resident, callers, self.unmanaged)
        division.put_in_order([unit.name for unit in units])
        return division

    # ---------------------------------------------------------------------------------------------- what there is

    def _collect_weights(self) -> None:
        named = list(named_own_parameters(self.root))
        if not named:
            raise ValueError(f"`{type(self.root).__name__}` has no parameters, so there is nothing to stream.")
        for name, _, _, parameter in named:
            check_parameter(name, parameter, self.on_meta)
        tied = set() if self.on_meta else tied_by_memory(self.root)
        for name, owner, _, parameter in named:
            if id(parameter) in self.weights or any(parameter is other for other in self.unmanaged.values()):
                continue
            if is_manageable(owner, parameter) and id(parameter) not in tied:
                self.weights[id(parameter)] = Weight(name, parameter)
            else:
                self.unmanaged[name] = parameter

    def _named_resident(self, names: Sequence[str]) -> tuple[set[int], set[int]]:
        modules = dict(self.root.named_modules(remove_duplicate=False))
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        resident_modules, resident_weights = set(), set()
        for name in names:
            if name in modules:
                resident_modules.add(id(modules[name]))
                resident_weights |= {id(parameter) for parameter in modules[name].parameters()}
            elif name in parameters:
                resident_weights.add(id(parameters[name]))
            else:
                known = ", ".join(child for child, _ in self.root.named_children())
                raise ValueError(f"`resident` names {name!r}, which is no module or parameter. Top level: {known}.")
        return resident_modules, resident_weights

    def _subtree_bytes(self, module: nn.Module) -> int:
        own = {id(p): p.nbytes for p in module.parameters() if id(p) in self.weights}
        return sum(nbytes for key, nbytes in own.items() if key not in self.resident_weights)

    def _parts(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Children that have something to stream."""
        inner = without_compile(module)
        prefix = "" if inner is module else "_orig_mod."
        return [(prefix + name, child) for name, child in inner.named_children() if self.sizes[id(child)]]

    # ------------------------------------------------------------------------------------------------- what moves

    def _atoms(self) -> list[tuple[str, nn.Module]]:
        """Modules that are not divided further, in the order of the tree."""
        if self.policy is not None:
            return self._atoms_by_policy(_as_predicate(self.policy))
        atoms = self._descend("", self.root, False, min(self.total // _SMALL_LEAF, _SMALL_BYTES), set())
        streamed = {id(p): p.nbytes for _, module in atoms for p in module.parameters()}
        if sum(streamed.values()) < 0.9 * self.total:  # many small leaves add up: stream them too
            atoms = self._descend("", self.root, False, 0, set())
        return atoms

    def _descend(
        self, name: str, module: nn.Module, is_block: bool, small: int, seen: set[int]
    ) -> list[tuple[str, nn.Module]]:
        nbytes, inner = self.sizes[id(module)], without_compile(module)
        if nbytes == 0 or id(module) in self.resident_modules or id(inner) in seen:
            return []
        seen.add(id(inner))
        parts = self._parts(module)
        if not parts:
            whole = _is_called(module) and (is_block or nbytes >= max(small, 1))
            return [(name, module)] if whole and id(module) not in self.split else []
        if self._stays_whole(module, is_block, nbytes):
            return [(name, module)]
        children_are_blocks = isinstance(inner, _LISTS) and len(parts) > 1
        atoms: list[tuple[str, nn.Module]] = []
        for child_name, child in parts:
            full_name = f"{name}.{child_name}" if name else child_name
            atoms += self._descend(full_name, child, children_are_blocks, small, seen)
        return atoms

    def _stays_whole(self, module: nn.Module, is_block: bool, nbytes: int) -> bool:
        if isinstance(without_compile(module), _READS_ITS_CHILDREN):
            return True
        if module is self.root or not _is_called(module) or id(module) in self.split:
            return False
        if self.max_unit_bytes is not None and nbytes > self.max_unit_bytes:
            return False
        if is_block:
            return 4 * nbytes <= self.total or not self._has_blocks(module)
        return nbytes * _TYPICAL_COUNT <= self.total

    def _has_blocks(self, module: nn.Module) -> bool:
        """Whether it is a list, or has a list of blocks inside; a list of leaves inside (an MLP) is not one."""
        return any(
            isinstance(inner, _LISTS)
            and len(parts) > 1
            and (inner is without_compile(module) or any(self._parts(part) for _, part in parts))
            for inner in module.modules()
            for parts in [self._parts(inner)]
        )

    def _atoms_by_policy(self, matches: Callable[[str, nn.Module], bool]) -> list[tuple[str, nn.Module]]:
        atoms: list[tuple[str, nn.Module]] = []
        covered: set[int] = set()
        matched = False
        for name, module in self.root.named_modules():
            inner = without_compile(module)
            is_root = inner is without_compile(self.root)
            if id(inner) in covered or is_root or not matches(name, inner):
                continue
            covered |= {id(part) for part in module.modules()}
            if _is_called(module) and id(module) not in self.split:
                if self.sizes[id(module)]:
                    atoms.append((name, module))
                matched = matched or self._could_move(module)
        if not matched and self.total:
            classes = Counter(type(module).__name__ for module in self.root.modules())
            common = ", ".join(name for name, _ in classes.most_common(8))
            raise ValueError(
                f"`units={self.policy!r}` matches no module of `{type(self.root).__name__}` that is called and has "
                f"weights to stream. Its most frequent module classes are: {common}."
            )
        return atoms

    def _could_move(self, module: nn.Module) -> bool:
        """Whether it has weights that no resident module holds: single ones may have become resident in a step."""
        held = {id(p) for part in self.root.modules() if id(part) in self.resident_modules for p in part.parameters()}
        return any(id(p) in self.weights and id(p) not in held for p in module.parameters())

    # -------------------------------------------------------------------------------------------- what is shared

    def _sort_out_sharing(self, atoms: list[tuple[str, nn.Module]]) -> tuple[list[set[int]], set[int]]:
        """Atoms to merge because they share (a tied embedding and head), and shared weights to keep resident."""
        users: dict[int, list[int]] = {}
        for index, (_, module) in enumerate(atoms):
            for parameter in {id(p) for p in module.parameters() if id(p) in self.weights}:
                users.setdefault(parameter, []).append(index)
        atom_modules = [{id(inner) for inner in module.modules()} for _, module in atoms]
        outside = self._used_outside(set().union(*atom_modules) if atom_modules else set())
        merge: list[set[int]] = []
        keep: set[int] = set(outside)
        for parameter, indices in users.items():
            if parameter in outside or parameter in self.resident_weights or len(indices) < 2:
                continue
            if all(not self._parts(atoms[index][1]) for index in indices):
                overlapping = [group for group in merge if group & set(indices)]
                merge = [group for group in merge if group not in overlapping]
                merge.append(set(indices).union(*overlapping))
            else:
                keep.add(parameter)
        return merge, keep

    def _used_outside(self, inside: set[int]) -> set[int]:
        """Weights of atoms that a module outside of all atoms owns too."""
        return {
            id(parameter)
            for _, owner, _, parameter in named_own_parameters(self.root)
            if id(owner) not in inside and id(parameter) in self.weights
        }

    def _merge_shared(
        self, atoms: list[tuple[str, nn.Module]], merge: list[set[int]]
    ) -> list[list[tuple[str, nn.Module]]]:
        """Atoms as one-element lists, merged ones together at the place of their first."""
        first_of = {min(group): sorted(group) for group in merge}
        merged = {index for group in merge for index in group}
        return [
            [atoms[other] for other in first_of.get(index, [index])]
            for index in range(len(atoms))
            if index not in merged or index in first_of
        ]

    # --------------------------------------------------------------------------------------------------- balance

    def _join(self, parts: list[list[tuple[str, nn.Module]]]) -> list[list[tuple[str, nn.Module]]]:
        """Join neighbours while the sum stays below the size of a typical unit."""
        if self.policy is not None or not parts:
            return parts
        sizes = [max(self.sizes[id(module)] for _, module in part) for part in parts]
        target = min(self.total // _TYPICAL_COUNT, _weighted_median(sizes))
        if self.max_unit_bytes is not None:
            target = min(target, self.max_unit_bytes)
        joined = [list(parts[0])]
        filled = sizes[0]
        for part, size in zip(parts[1:], sizes[1:], strict=True):
            if filled + size <= target:
                joined[-1] += part
                filled += size
            else:
                joined.append(list(part))
                filled = size
        return joined

    # --------------------------------------------------------------------------------------------------- members

    def _make_unit(self, atoms: list[tuple[str, nn.Module]]) -> Unit:
        unit = Unit(atoms[0][0] if len(atoms) == 1 else f"{atoms[0][0]}..{atoms[-1][0]}")
        found: dict[int, Weight] = {}
        for name, module in atoms:
            member = Member(name, module, unit)
            self._add_places(member, module.modules())
            unit.members.append(member)
            found |= {
                id(place.weight): place.weight
                for place in member.places
                if id(place.weight.master) not in self.resident_weights
            }
        unit.weights = list(found.values())
        return unit

    def _remaining_members(self, units: list[Unit], resident: Unit) -> list[Member]:
        """Gates for modules outside of units: as large as possible below, one by one around units."""
        members = [member for unit in [*units, resident] for member in unit.members]
        streamed = {id(member.module) for member in members}
        inside = {id(inner) for member in members for inner in member.module.modules()}
        unit_around = {id(inner): member.unit for member in members for inner in member.module.modules()}
        callers: list[Member] = []

        def visit(name: str, module: nn.Module) -> None:
            inner = without_compile(module)
            if id(module) in inside or id(inner) in unit_around:
                unit = unit_around.get(id(inner))
                if id(module) not in streamed and unit is not None and _is_called(module):
                    streamed.add(id(module))  # part of a unit, and called from outside of it, too
                    member = Member(name, module, unit)
                    self._add_places(member, module.modules())
                    unit.members.append(member)
                return
            around = any(id(part) in unit_around for part in module.modules())
            member = Member(name, module, resident)
            callable_ = _is_called(module) and not isinstance(module, torch.jit.ScriptModule)
            if callable_:
                whole = not around and module is not self.root and id(module) not in self.split
                self._add_places(member, module.modules() if whole else [inner])
                inside.update(id(part) for part in (module.modules() if whole else [module]))
                if member.places:
                    resident.members.append(member)
                elif around or module is self.root:
                    member.unit = None
                    callers.append(member)
                if whole:
                    return
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)

        visit("", self.root)
        return callers

    def _add_places(self, member: Member, modules: Iterator[nn.Module] | list[nn.Module]) -> None:
        for module in modules:
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.weights:
                    member.places.append(Place(module._parameters, key, self.weights[id(parameter)]))

    def _find_recurrent(self, member: Member) -> None:
        """RNNs compute with a list of their own, `_flat_weights`, not with `_parameters`."""
        by_master = {id(place.weight.master): place.weight for place in member.places}
        for module in member.module.modules():
            if isinstance(module, nn.RNNBase) and all(id(p) in by_master for p in module._flat_weights):
                member.recurrent.append((module, [by_master[id(p)] for p in module._flat_weights]))


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward at all; containers without one are only reached into by their parents."""
    return forward_of_class(module) is not nn.Module.forward or "forward" in vars(module)


def forward_of_class(module: nn.Module) -> Any:
    """A module's `forward` as it stands in its class: a scripted one would compute what it gives.

    Not by `inspect.getattr_static`, which `torch.compile` would trace when it meets the engine in a model.
    """
    return next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))


def _as_predicate(policy: UnitPolicy) -> Callable[[str, nn.Module], bool]:
    if callable(policy) and not isinstance(policy, type):
        return policy
    entries = [policy] if isinstance(policy, str | type) else list(policy)
    names = {entry for entry in entries if isinstance(entry, str)}
    classes = tuple(entry for entry in entries if isinstance(entry, type))
    return lambda _, module: (
        isinstance(module, classes)
        or any(cls.__name__ in names or f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(module).__mro__)
    )


def _weighted_median(sizes: Sequence[int]) -> int:
    """The size below and above which half of all bytes lie."""
    half, seen = sum(sizes) / 2, 0
    for size in sorted(sizes):
        seen += size
        if seen >= half:
            return size
    return 0
