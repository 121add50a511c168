"""From a module tree to units: which modules stream, and which weights stay on the device.

Units are found in any tree:

1. children of lists (`ModuleList`, `Sequential`, `ModuleDict`) are blocks; a block that is too large is divided,
2. outside of lists, small modules stay whole and large ones are divided, down to leaves (embeddings, heads);
   a `Sequential` of blocks is always divided: a stage of a CNN has few weights, but saves many activations,
3. neighbors are joined while their sum stays below the size of a typical unit, which balances sizes (VGG, ResNet), and
   a leaf joins the one that it shares a weight with (a tied embedding and head); then `k_prime` of these are one unit,
4. the rest is resident: small leaves, parameters of modules that have units in them, and weights that units share.

Layers of torch's that read weights of the layers in them, without calling these, are never divided, whatever their size
or a user's policy. In evaluation they may be a single operation, which rounds differently and must see their twins.

The search looks through the wrapper that `torch.compile(module)` returns. But the wrapper becomes the member, because
the model calls the wrapper.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import nn

from sp_lightning.pipeline.options import UnitPolicy, as_predicate
from sp_lightning.pipeline.torch_private import is_compiled, without_compile
from sp_lightning.pipeline.units.tree import Tree, make_division, named_own_parameters
from sp_lightning.pipeline.units.unit import Division
from sp_lightning.pipeline.weights.autocast import WITH_FAST_PATH
from sp_lightning.pipeline.weights.weight import Weight

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # no unit is larger than 1/6 of the device
_TYPICAL_UNIT_COUNT = 12  # outside of lists, modules up to 1/12 of the model stay whole
_DIVIDED_BLOCK_COUNT = 4  # blocks with lists inside stay whole up to 1/4 of the model
_SMALL_LEAF_DIVISOR = 50  # leaves below 1/50 of the model are not worth streaming on their own,
# unless they are larger than this: a large model's embedding would fill a small device
_SMALL_LEAF_BYTES = 256 << 20
# many small leaves add up: if less of the model would stream without them, they do, too
_LEAST_STREAMED = 0.9


@dataclass(frozen=True)
class Piece:
    """A module that is not divided further."""

    module: nn.Module
    nbytes: int  # of all weights at and below it that may stream
    is_block: bool  # whether it is a child of a list
    is_leaf: bool  # whether no child has weights that may stream


StaysWhole = Callable[[Piece], bool]


def find_units(
    root: nn.Module,
    policy: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    device_bytes: int | None = None,
    split: Collection[str] = (),
    k_prime: int = 1,
) -> Division:
    """Find the units of a module tree, by the user's `policy` or by the rules at the top of this file.

    Blocks above a part of `device_bytes` are divided, and so are those that turned out not to be called themselves
    (`split`). Weights named in `resident` stay on the device. `k_prime` neighbors are joined into one unit.

    Raises:
        ValueError: If there is nothing to stream, or a name or policy matches nothing.
    """
    tree = Tree(root, resident, split)
    if not (tree.weights or tree.unmanaged):
        raise ValueError(f"`{type(root).__name__}` has no parameters, so there is nothing to stream.")
    if policy is not None:
        matches = as_predicate(policy)

        def is_unit(piece: Piece) -> bool:
            return matches(tree.names[id(piece.module)], without_compile(piece.module))

        pieces = _divide(tree, is_unit)
        if not (pieces or split) and tree.total:
            raise _nothing_matches(policy, root)
        typical = 0  # the user's choices are not joined
    else:
        largest = _LARGEST_UNIT_BYTES
        if device_bytes is not None:
            largest = min(largest, device_bytes // _UNITS_PER_DEVICE)
        pieces = _worth_streaming(tree, _divide(tree, partial(_stays_whole, tree, largest)))
        typical = min(tree.total // _TYPICAL_UNIT_COUNT, _middle([piece.nbytes for piece in pieces]), largest)
    groups = _join_by_number(_join(tree, pieces, typical), k_prime)
    return make_division(tree, groups, _resident_weights(tree, groups))


def _nothing_matches(policy: UnitPolicy, root: nn.Module) -> ValueError:
    classes = Counter(type(module).__name__ for module in root.modules())
    common = ", ".join(name for name, _ in classes.most_common(8))
    return ValueError(
        f"`units={policy!r}` matches no module of `{type(root).__name__}` that is called and has "
        f"weights to stream. Its most frequent module classes are: {common}."
    )


# Dividing: which modules stay whole.


def _divide(tree: Tree, stays_whole: StaysWhole) -> list[Piece]:
    """Divide a tree into the outermost modules that stay whole, in its order; modules in none of them are left out."""
    seen: set[int] = set()

    def divide(module: nn.Module, is_block: bool) -> list[Piece]:
        inner = without_compile(module)
        if not tree.bytes_of(module) or id(inner) in seen:
            return []
        seen.add(id(inner))
        children = tree.streamable_children(module)
        piece = Piece(module, tree.bytes_of(module), is_block, is_leaf=not children)
        is_called = tree.may_be_member(module)
        reads_weights_inside = is_called and isinstance(inner, WITH_FAST_PATH)
        may_be_whole = is_called and (piece.is_leaf or module is not tree.root)
        if (may_be_whole or reads_weights_inside) and stays_whole(piece):
            seen.update(map(id, module.modules()))
            return [piece]
        are_blocks = bool(_blocks_of_list(tree, module))
        pieces = [part for child in children for part in divide(child, are_blocks)]
        return [piece] if pieces and reads_weights_inside else pieces

    return divide(tree.root, is_block=False)


def _stays_whole(tree: Tree, largest: int, piece: Piece) -> bool:
    """Tell whether a module is not divided; `largest` is in bytes."""
    if piece.is_leaf or isinstance(without_compile(piece.module), WITH_FAST_PATH):
        return True
    if piece.nbytes > largest or _only_calls_blocks(tree, piece.module):
        return False
    if not piece.is_block:
        return piece.nbytes * _TYPICAL_UNIT_COUNT <= tree.total
    return piece.nbytes * _DIVIDED_BLOCK_COUNT <= tree.total or not _has_blocks(tree, piece.module)


def _only_calls_blocks(tree: Tree, module: nn.Module) -> bool:
    """Tell whether it is a chain of blocks alone: each block can recompute its activations by itself."""
    if type(module) is not nn.Sequential or is_compiled(module):
        return False
    return len(module) > 1 and all(map(tree.streamable_children, module))


def _blocks_of_list(tree: Tree, module: nn.Module) -> list[nn.Module]:
    """Return the children of a list, if several of them have something to stream; else nothing."""
    children = tree.streamable_children(module)
    is_list = isinstance(without_compile(module), _LISTS) and len(children) > 1
    return children if is_list else []


def _has_blocks(tree: Tree, module: nn.Module) -> bool:
    """Tell whether it is a list, or has a list of blocks inside; a list of leaves (an MLP) inside does not count."""
    if _blocks_of_list(tree, module):
        return True
    blocks = chain(*(_blocks_of_list(tree, inner) for inner in module.modules()))
    return any(map(tree.streamable_children, blocks))


def _worth_streaming(tree: Tree, pieces: list[Piece]) -> list[Piece]:
    """Leave out small leaves outside of lists, unless they add up to a good part of the model."""
    small = min(tree.total // _SMALL_LEAF_DIVISOR, _SMALL_LEAF_BYTES)
    larger = [piece for piece in pieces if piece.is_block or not piece.is_leaf or piece.nbytes >= small]
    streamed = {weight for piece in larger for weight in tree.weights_of(piece.module)}
    is_enough = sum(weight.nbytes for weight in streamed) >= _LEAST_STREAMED * tree.total
    return larger if is_enough else pieces


# Joining: which modules are one unit.


def _join(tree: Tree, pieces: Sequence[Piece], typical: int) -> list[list[nn.Module]]:
    """Join neighbors up to the size of a typical unit in bytes, and leaves that share a weight, wherever they are."""
    groups: list[list[nn.Module]] = []
    # the group of the first leaf that has a weight
    group_of_leaf: dict[Weight, list[nn.Module]] = {}
    room = 0  # bytes until the last group has the typical size
    for piece in pieces:
        weights = tree.weights_of(piece.module) if piece.is_leaf else []
        tied = [group_of_leaf[weight] for weight in weights if weight in group_of_leaf]
        if tied:
            tied[0].append(piece.module)
        elif piece.nbytes <= room:
            groups[-1].append(piece.module)
            room -= piece.nbytes
        else:
            groups.append([piece.module])
            room = typical - piece.nbytes
        for weight in weights:
            group_of_leaf.setdefault(weight, tied[0] if tied else groups[-1])
    return groups


def _middle(sizes: Sequence[int]) -> int:
    """Return the size at which the pieces up to it have half of all bytes."""
    below = 0
    for size in sorted(sizes):
        below += size
        if 2 * below >= sum(sizes):
            return size
    return 0


def _join_by_number(groups: Sequence[list[nn.Module]], k_prime: int) -> list[list[nn.Module]]:
    """Join `k_prime` neighbors each."""
    if k_prime > len(groups) > 0:
        warnings.warn(
            f"`k_prime={k_prime}` is above the number of units, {len(groups)}. All units move together, and "
            "no copy overlaps with computing.",
            stacklevel=2,
        )
    return [[*chain(*groups[first : first + k_prime])] for first in range(0, len(groups), k_prime)]


def _resident_weights(tree: Tree, groups: Sequence[list[nn.Module]]) -> set[Weight]:
    """Find the weights that the user wants to be resident, that modules outside of all groups own, or groups share."""
    inside = {id(module) for group in groups for part in group for module in part.modules()}
    resident = set(tree.resident)
    for _, owner, parameter in named_own_parameters(tree.root):
        if id(owner) not in inside and id(parameter) in tree.weights:
            resident.add(tree.weights[id(parameter)])
    users = Counter(weight for group in groups for weight in {*chain(*map(tree.weights_of, group))})
    return resident | {weight for weight, number in users.items() if number > 1}
