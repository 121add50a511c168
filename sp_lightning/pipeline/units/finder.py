"""From a module tree to units: which modules stream, and which weights stay on the device.

Units are found in any tree:

1. children of lists (`ModuleList`, `Sequential`, `ModuleDict`) are blocks; a block that is too large is descended into,
2. outside of lists, small modules stay whole and large ones are descended into, down to leaves (embeddings, heads);
   a `Sequential` of blocks is always descended into: a stage of a CNN has few weights, but saves many activations,
3. neighbors are joined while the sum stays below the size of a typical unit, which balances sizes (VGG, ResNet),
4. what is left (small leaves, parameters that a module with units in it owns itself) is resident.

Layers of torch's that read weights of the layers in them, without calling these, are never divided, whatever their size
or a user's policy: in evaluation they may be a single operation, which rounds otherwise, and must see their twins.

The search looks through the wrapper that `torch.compile(module)` returns, but it is the wrapper that becomes the
member, because it is what is called.

Parameters that several modules share are recognized by identity: leaves that share one form a unit, and what blocks
share is resident.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from sp_lightning.pipeline.options import UnitPolicy, as_predicate
from sp_lightning.pipeline.torch_private import is_compiled, without_compile
from sp_lightning.pipeline.units.tree import Tree, is_called, named_own_parameters
from sp_lightning.pipeline.units.unit import Division, Entry, Member, Unit
from sp_lightning.pipeline.weights.autocast import WITH_FAST_PATH

_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # blocks above 1/6 of the device are divided
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TYPICAL_UNIT_COUNT = 12  # outside of lists, modules up to 1/12 of the model stay whole
_SMALL_LEAF_DIVISOR = 50  # leaves below 1/50 of the model are not worth streaming on their own,
_SMALL_LEAF_BYTES = 256 << 20  # unless they are larger than this: a large model's embedding would fill a small device


def find_units(
    root: nn.Module,
    policy: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    device_bytes: int | None = None,
    split: Sequence[nn.Module] = (),
    used_outside: Collection[int] = (),
) -> Division:
    """Find the units of a module tree, by the user's `policy` or by the rules at the top of this file.

    Blocks above a part of `device_bytes` are descended into, and so are those that turned out not to be called
    themselves (`split`). What is named in `resident`, or turned out to be `used_outside`, stays on the device.

    Raises:
        ValueError: If there is nothing to stream, or a name or policy matches nothing.
    """
    tree = Tree(root, resident, split, used_outside)
    largest = (
        _LARGEST_UNIT_BYTES if device_bytes is None else min(_LARGEST_UNIT_BYTES, device_bytes // _UNITS_PER_DEVICE)
    )
    if policy is None:
        atoms = _atoms_by_structure(tree, largest)
    else:
        matches = as_predicate(policy)
        atoms = _divide(tree, root, lambda it, _: matches(tree.names[id(it)], without_compile(it)), set())
        if not (atoms or split or used_outside) and tree.total:
            raise _nothing_matches(policy, root)
    parts, resident_weights = _join_sharing(tree, atoms)
    if policy is None:
        parts = _join_neighbors(tree, parts, largest)
    units = [unit for part in parts if (unit := _make_unit(tree, part, resident_weights)).weights]
    streamed = {id(weight) for unit in units for weight in unit.weights}
    rest = Unit("resident", resident=True)
    rest.weights = [weight for weight in tree.weights.values() if id(weight) not in streamed]
    for unit in [*units, rest]:
        for weight in unit.weights:
            weight.unit = unit
    division = Division(units, rest, _add_remaining_members(tree, units, rest), tree.unmanaged)
    division.put_in_order([unit.name for unit in units])
    return division


def _nothing_matches(policy: UnitPolicy, root: nn.Module) -> ValueError:
    classes = Counter(type(module).__name__ for module in root.modules())
    common = ", ".join(name for name, _ in classes.most_common(8))
    return ValueError(
        f"`units={policy!r}` matches no module of `{type(root).__name__}` that is called and has weights to stream. "
        f"Its most frequent module classes are: {common}."
    )


def _atoms_by_structure(tree: Tree, largest: int) -> list[nn.Module]:
    """Find the modules that are not divided further, in the order of the tree; `largest` is in bytes."""
    atoms: list[nn.Module] = []
    for small in (min(tree.total // _SMALL_LEAF_DIVISOR, _SMALL_LEAF_BYTES), 0):
        atoms = _divide(tree, tree.root, partial(_stays_whole, tree, largest, small), set())
        keys = {id(p) for atom in atoms for p in atom.parameters() if id(p) in tree.weights}
        if sum(tree.weights[key].nbytes for key in keys) >= 0.9 * tree.total:
            break  # else many small leaves add up: stream them, too
    return atoms


def _divide(
    tree: Tree,
    module: nn.Module,
    stays_whole: Callable[[nn.Module, bool], bool],
    seen: set[int],
    is_block: bool = False,
) -> list[nn.Module]:
    """Find atoms at and below a module; `stays_whole` is asked of each with whether it is a child of a list."""
    inner = without_compile(module)
    if not tree.bytes_of(module) or id(inner) in seen:
        return []
    seen.add(id(inner))
    children = tree.streamable_children(module)
    reads_weights_inside = isinstance(inner, WITH_FAST_PATH) and tree.may_be_member(module)
    may_be_whole = tree.may_be_member(module) and not (children and module is tree.root)
    if (may_be_whole or reads_weights_inside) and stays_whole(module, is_block):
        seen.update(map(id, module.modules()))
        return [module]
    are_blocks = isinstance(inner, _LISTS) and len(children) > 1
    atoms = [atom for child in children for atom in _divide(tree, child, stays_whole, seen, are_blocks)]
    return [module] if atoms and reads_weights_inside else atoms


def _stays_whole(tree: Tree, largest: int, small: int, module: nn.Module, is_block: bool) -> bool:
    """Tell whether a module is not divided; leaves outside of lists with less than `small` bytes are left out."""
    nbytes = tree.bytes_of(module)
    if not tree.streamable_children(module):
        return is_block or nbytes >= small
    if isinstance(without_compile(module), WITH_FAST_PATH):
        return True
    called = [*module.children()] if type(module) is nn.Sequential and not is_compiled(module) else []
    if nbytes > largest or (len(called) > 1 and all(map(tree.streamable_children, called))):
        return False  # what only calls blocks is divided, as each of them can recompute its activations by itself
    if is_block:
        return 4 * nbytes <= tree.total or not _has_blocks(tree, module)
    return nbytes * _TYPICAL_UNIT_COUNT <= tree.total


def _has_blocks(tree: Tree, module: nn.Module) -> bool:
    """Tell whether it is a list, or has a list of blocks inside; a list of leaves (an MLP) inside is not one."""
    lists = {inner: tree.streamable_children(inner) for inner in module.modules() if isinstance(inner, _LISTS)}
    return any(
        len(children) > 1 and (inner is without_compile(module) or any(map(tree.streamable_children, children)))
        for inner, children in lists.items()
    )


def _join_sharing(tree: Tree, atoms: Sequence[nn.Module]) -> tuple[list[list[nn.Module]], set[int]]:
    """Join a leaf to the first one that it shares a weight with (a tied embedding and head).

    Weights that blocks share are resident, and so are those of modules outside of all atoms.
    """
    inside = {id(module) for atom in atoms for module in atom.modules()}
    resident = {id(p) for _, owner, p in named_own_parameters(tree.root) if id(owner) not in inside}
    resident |= tree.resident_weights
    parts: list[list[nn.Module]] = []
    part_of: dict[int, list[nn.Module]] = {}  # by weight, the first part that has it
    for atom in atoms:
        keys = [id(p) for p in atom.parameters() if id(p) not in resident]
        first_parts = [part_of[key] for key in keys if key in part_of]
        is_leaf = not tree.streamable_children(atom)
        if is_leaf and first_parts and not tree.streamable_children(first_parts[0][0]):
            part = first_parts[0]
            part.append(atom)
        else:
            part = [atom]
            parts.append(part)
        for key in keys:
            if part_of.setdefault(key, part) is not part:
                resident.add(key)
    return parts, resident


def _join_neighbors(tree: Tree, parts: Sequence[list[nn.Module]], largest: int) -> list[list[nn.Module]]:
    """Join neighbors while the sum stays below the size of a typical unit: half of all bytes are in smaller parts."""
    sizes = [max(map(tree.bytes_of, part)) for part in parts]
    below = itertools.accumulate(sorted(sizes))
    median = next((size for size, seen in zip(sorted(sizes), below, strict=True) if 2 * seen >= sum(sizes)), 0)
    target = min(tree.total // _TYPICAL_UNIT_COUNT, median, largest)
    joined: list[list[nn.Module]] = []
    room = -1
    for part, size in zip(parts, sizes, strict=True):
        if size <= room:
            joined[-1] += part
            room -= size
        else:
            joined.append(list(part))
            room = target - size
    return joined


def _make_unit(tree: Tree, part: Sequence[nn.Module], resident_weights: set[int]) -> Unit:
    names = [tree.names[id(atom)] for atom in part]
    unit = Unit(names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}")
    unit.members = [_make_member(tree, atom, unit) for atom in part]
    weights = {id(entry.weight): entry.weight for member in unit.members for entry in member.entries}
    unit.weights = [weight for weight in weights.values() if id(weight.master) not in resident_weights]
    unit.weights.sort(key=lambda weight: weight.master.requires_grad)  # what is stepped is sent in one copy
    return unit


# Members: the modules whose calls enter a unit, and those whose calls only open a step.


def _make_member(tree: Tree, module: nn.Module, unit: Unit | None, inner: Iterable[nn.Module] | None = None) -> Member:
    """Make a member, with the places in which its call may find weights: in itself and below, or in `inner` modules."""
    member = Member(tree.names[id(module)], module, unit)
    for owner in module.modules() if inner is None else inner:
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in tree.weights:
                member.entries.append(Entry(owner._parameters, key, tree.weights[id(parameter)]))
        if isinstance(owner, nn.RNNBase) and all(id(p) in tree.weights for p in owner._flat_weights):
            member.recurrent.append((owner, [tree.weights[id(p)] for p in owner._flat_weights]))
    return member


def _add_remaining_members(tree: Tree, units: Sequence[Unit], resident: Unit) -> list[Member]:
    """Make members of what is outside of units: of whole subtrees without units, and of each module around units.

    Those of the latter that own no weights are returned: they have no unit, and their calls open a step.
    """
    members = [member for unit in [*units, resident] for member in unit.members]
    have_gates = {id(member.module) for member in members}
    unit_around = {id(inner): member.unit for member in members for inner in member.module.modules()}
    covered, callers = set(unit_around), []
    for module in tree.root.modules():
        inner = without_compile(module)
        if id(module) in covered or id(inner) in unit_around:
            continue
        around_units = any(id(part) in unit_around for part in module.modules())
        if is_called(module) and not isinstance(module, torch.jit.ScriptModule):
            whole = not around_units and module is not tree.root and tree.may_be_member(module)
            covered.update(id(part) for part in (module.modules() if whole else [module]))
            member = _make_member(tree, module, resident, None if whole else [inner])
            if member.entries:
                resident.members.append(member)
            elif around_units or module is tree.root:
                callers.append(_make_member(tree, module, None, _looked_into(inner, have_gates)))
            if whole:
                continue
        for child in module.children():  # parts of units, which may be called from here, too
            unit = unit_around.get(id(without_compile(child)))
            if unit is not None and id(child) not in have_gates and is_called(child):
                have_gates.add(id(child))
                unit.members.append(_make_member(tree, child, unit))
    return callers


def _looked_into(module: nn.Module, members: Collection[int]) -> Iterable[nn.Module]:
    """Return the modules whose weights a module around units looks at, to choose a fast path: it must see twins."""
    first = next(iter(module.layers.children()), None) if isinstance(module, nn.TransformerEncoder) else None
    return first.modules() if first is not None and id(first) in members else ()
