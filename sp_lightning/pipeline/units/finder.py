"""From a module tree to units: which modules stream, and which weights stay on the device.

Units are found in any tree:

1. children of lists (`ModuleList`, `Sequential`, `ModuleDict`) are blocks; a block that is too large is descended into,
2. outside of lists, small modules stay whole and large ones are descended into, down to leaves (embeddings, heads);
   a `Sequential` of blocks is always descended into: a stage of a CNN has few weights, but saves many activations,
3. neighbors are joined while the sum stays below the size of a typical unit, which balances sizes (VGG, ResNet); then
   `k_prime` of them, which the user wants to move together,
4. what is left (small leaves, parameters that a module with units in it owns itself) is resident.

Layers of torch's that read weights of the layers in them, without calling these, are never divided, whatever their size
or a user's policy: in evaluation they may be a single operation, which rounds otherwise, and must see their twins.

The search looks through the wrapper that `torch.compile(module)` returns, but it is the wrapper that becomes the
member, because it is what is called.

Parameters that several modules share are recognized by identity: leaves that share one form a unit, and what blocks
share is resident.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import chain

import torch
from torch import nn

from sp_lightning.pipeline.options import UnitPolicy, as_predicate
from sp_lightning.pipeline.torch_private import is_compiled, without_compile
from sp_lightning.pipeline.units.tree import Tree, is_called, named_own_parameters
from sp_lightning.pipeline.units.unit import Division, Entry, Member, Unit
from sp_lightning.pipeline.weights.autocast import WITH_FAST_PATH
from sp_lightning.pipeline.weights.weight import Weight

_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # blocks above 1/6 of the device are divided
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TYPICAL_UNIT_COUNT = 12  # outside of lists, modules up to 1/12 of the model stay whole
_SMALL_LEAF_DIVISOR = 50  # leaves below 1/50 of the model are not worth streaming on their own,
# unless they are larger than this: a large model's embedding would fill a small device
_SMALL_LEAF_BYTES = 256 << 20


def find_units(
    root: nn.Module,
    policy: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    device_bytes: int | None = None,
    split: Collection[str] = (),
    k_prime: int = 1,
) -> Division:
    """Find the units of a module tree, by the user's `policy` or by the rules at the top of this file.

    Blocks above a part of `device_bytes` are descended into, and so are those that turned out not to be called
    themselves (`split`). What is named in `resident` stays on the device. Of what is found, `k_prime` neighbors are one
    unit.

    Raises:
        ValueError: If there is nothing to stream, or a name or policy matches nothing.
    """
    tree = Tree(root, resident, split)
    if not (tree.weights or tree.unmanaged):
        raise ValueError(f"`{type(root).__name__}` has no parameters, so there is nothing to stream.")
    largest = _LARGEST_UNIT_BYTES
    if device_bytes is not None:
        largest = min(largest, device_bytes // _UNITS_PER_DEVICE)
    if policy is None:
        atoms = _atoms_by_structure(tree, largest)
    else:
        atoms = _atoms_by_policy(tree, policy)
        if not (atoms or split) and tree.total:
            raise _nothing_matches(policy, root)
    parts, resident_weights = _join_sharing(tree, atoms)
    if policy is None:
        parts = _join_neighbors(tree, parts, largest)
    parts = _join_by_number(parts, k_prime)
    found = [_make_unit(tree, part, resident_weights) for part in parts]
    units = [unit for unit in found if unit.weights]
    streamed = {weight for unit in units for weight in unit.weights}
    rest = Unit("resident", resident=True)
    rest.weights = [weight for weight in tree.weights.values() if weight not in streamed]
    rest.members = [member for unit in found if not unit.weights for member in unit.members]
    for member in rest.members:  # they are called as before their weights were used outside of them
        member.unit = rest
    for unit in [*units, rest]:
        for weight in unit.weights:
            weight.unit = unit
    callers = _add_remaining_members(tree, units, rest)
    streamed_members = [member for unit in units for member in unit.members]
    for index, member in enumerate(streamed_members):
        assert member.unit is not None
        member.index = index
        member.is_streamed = True
        member.unit_name = member.unit.name
    return Division(units, rest, streamed_members, callers, tree.unmanaged)


def _nothing_matches(policy: UnitPolicy, root: nn.Module) -> ValueError:
    classes = Counter(type(module).__name__ for module in root.modules())
    common = ", ".join(name for name, _ in classes.most_common(8))
    return ValueError(
        f"`units={policy!r}` matches no module of `{type(root).__name__}` that is called and has "
        f"weights to stream. Its most frequent module classes are: {common}."
    )


def _atoms_by_policy(tree: Tree, policy: UnitPolicy) -> list[nn.Module]:
    matches = as_predicate(policy)

    def stays_whole(module: nn.Module, _: bool) -> bool:
        return matches(tree.names[id(module)], without_compile(module))

    return _divide(tree, tree.root, stays_whole, set())


def _atoms_by_structure(tree: Tree, largest: int) -> list[nn.Module]:
    """Find the modules that are not divided further, in the order of the tree; `largest` is in bytes."""
    small = min(tree.total // _SMALL_LEAF_DIVISOR, _SMALL_LEAF_BYTES)
    atoms = _divide(tree, tree.root, partial(_stays_whole, tree, largest, small), set())
    inside = {weight for atom in atoms for weight in tree.weights_of(atom)}
    # many small leaves add up: stream them, too
    if sum(weight.nbytes for weight in inside) < 0.9 * tree.total:
        atoms = _divide(tree, tree.root, partial(_stays_whole, tree, largest, 0), set())
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
    atoms: list[nn.Module] = []
    for child in children:
        atoms += _divide(tree, child, stays_whole, seen, are_blocks)
    return [module] if atoms and reads_weights_inside else atoms


def _stays_whole(tree: Tree, largest: int, small: int, module: nn.Module, is_block: bool) -> bool:
    """Tell whether a module is not divided; leaves outside of lists with less than `small` bytes are left out."""
    nbytes = tree.bytes_of(module)
    if not tree.streamable_children(module):
        return is_block or nbytes >= small
    if isinstance(without_compile(module), WITH_FAST_PATH):
        return True
    if nbytes > largest or _only_calls_blocks(tree, module):
        return False
    if is_block:
        return 4 * nbytes <= tree.total or not _has_blocks(tree, module)
    return nbytes * _TYPICAL_UNIT_COUNT <= tree.total


def _only_calls_blocks(tree: Tree, module: nn.Module) -> bool:
    """Tell whether it is a chain of blocks alone, each of which can recompute its activations by itself."""
    if type(module) is not nn.Sequential or is_compiled(module):
        return False
    return len(module) > 1 and all(map(tree.streamable_children, module))


def _has_blocks(tree: Tree, module: nn.Module) -> bool:
    """Tell whether it is a list, or has a list of blocks inside; a list of leaves (an MLP) inside is not one."""
    for inner in module.modules():
        children = tree.streamable_children(inner)
        is_list = isinstance(inner, _LISTS) and len(children) > 1
        if is_list and (inner is without_compile(module) or any(map(tree.streamable_children, children))):
            return True
    return False


def _join_sharing(tree: Tree, atoms: Sequence[nn.Module]) -> tuple[list[list[nn.Module]], set[Weight]]:
    """Join a leaf to the first one that it shares a weight with (a tied embedding and head).

    Weights that blocks share are resident, and so are those of modules outside of all atoms.
    """
    inside = {id(module) for atom in atoms for module in atom.modules()}
    resident = set(tree.resident)
    for _, owner, parameter in named_own_parameters(tree.root):
        if id(owner) not in inside and id(parameter) in tree.weights:
            resident.add(tree.weights[id(parameter)])
    parts: list[list[nn.Module]] = []
    part_of: dict[Weight, list[nn.Module]] = {}  # the first part that has a weight
    for atom in atoms:
        weights = [weight for weight in tree.weights_of(atom) if weight not in resident]
        part = next((part_of[weight] for weight in weights if weight in part_of), None)
        if part is None or tree.streamable_children(atom) or tree.streamable_children(part[0]):
            part = []
            parts.append(part)
        part.append(atom)
        resident.update(weight for weight in weights if part_of.setdefault(weight, part) is not part)
    return parts, resident


def _join_neighbors(tree: Tree, parts: Sequence[list[nn.Module]], largest: int) -> list[list[nn.Module]]:
    """Join neighbors while the sum stays below the size of a typical unit."""
    sizes = [max(map(tree.bytes_of, part)) for part in parts]
    target = min(tree.total // _TYPICAL_UNIT_COUNT, _middle(sizes), largest)
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


def _join_by_number(parts: Sequence[list[nn.Module]], k_prime: int) -> list[list[nn.Module]]:
    """Join `k_prime` neighbors each."""
    if k_prime > len(parts) > 0:
        warnings.warn(
            f"`k_prime={k_prime}` is above the number of units, {len(parts)}: all units move together, "
            "and no copy overlaps with computing.",
            stacklevel=2,
        )
    return [[*chain(*parts[first : first + k_prime])] for first in range(0, len(parts), k_prime)]


def _middle(sizes: Sequence[int]) -> int:
    """Return the size up to which parts have half of all bytes."""
    below = 0
    for size in sorted(sizes):
        below += size
        if 2 * below >= sum(sizes):
            return size
    return 0


def _make_unit(tree: Tree, part: Sequence[nn.Module], resident: Set[Weight]) -> Unit:
    names = [tree.names[id(atom)] for atom in part]
    unit = Unit(names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}")
    unit.members = [_make_member(tree, atom, unit) for atom in part]
    weights = dict.fromkeys(entry.weight for member in unit.members for entry in member.every_entry)
    unit.weights = [weight for weight in weights if weight not in resident]
    # what is stepped is sent in one copy
    unit.weights.sort(key=lambda weight: weight.master.requires_grad)
    return unit


# Members: the modules whose calls enter a unit, and those whose calls only open a step.


def _make_member(tree: Tree, module: nn.Module, unit: Unit | None, owners: Iterable[nn.Module] | None = None) -> Member:
    """Make a member. Its call may find weights in itself and below, or in the modules that are given as `owners`."""
    member = Member(tree.names[id(module)], module, unit)
    for owner in module.modules() if owners is None else owners:
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in tree.weights:
                member.every_entry.append(Entry(owner._parameters, key, tree.weights[id(parameter)]))
        if isinstance(owner, nn.RNNBase):
            weights = [tree.weights[id(p)] for p in owner._flat_weights if id(p) in tree.weights]
            if len(weights) == len(owner._flat_weights):
                member.recurrent.append((owner, weights))
    return member


def _add_remaining_members(tree: Tree, units: Sequence[Unit], resident: Unit) -> list[Member]:
    """Make members of what is outside of units: of whole subtrees without units, and of each module around units.

    Those of the latter that own no weights are returned: they have no unit, and their calls open a step.
    """
    members = [member for unit in (*units, resident) for member in unit.members]
    have_gates = {id(member.module) for member in members}
    unit_around = {id(inner): member.unit for member in members for inner in member.module.modules()}
    covered = set(unit_around)
    callers: list[Member] = []
    for module in tree.root.modules():
        inner = without_compile(module)
        if id(module) in covered or id(inner) in unit_around:
            continue
        around_units = any(id(part) in unit_around for part in module.modules())
        if is_called(module) and not isinstance(module, torch.jit.ScriptModule):
            whole = not around_units and module is not tree.root and tree.may_be_member(module)
            member = _make_member(tree, module, resident, None if whole else [inner])
            if member.every_entry:
                resident.members.append(member)
            elif around_units or module is tree.root:
                callers.append(_make_member(tree, module, None, _looked_into(inner, have_gates)))
            if whole:
                covered.update(map(id, module.modules()))
                continue
        for child in module.children():  # parts of units, which may be called from here, too
            unit = unit_around.get(id(without_compile(child)))
            if unit is not None and id(child) not in have_gates and is_called(child):
                have_gates.add(id(child))
                unit.members.append(_make_member(tree, child, unit))
    return callers


def _looked_into(module: nn.Module, have_gates: Set[int]) -> Iterable[nn.Module]:
    """Return the modules whose weights a module around units looks at, to choose a fast path: it must see twins."""
    if isinstance(module, nn.TransformerEncoder):
        for first in module.layers:
            return first.modules() if id(first) in have_gates else ()
    return ()
