"""Where a module tree is divided: at blocks that its structure shows (rules 1 and 2 of finder.py), or as users say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from sp_lightning.pipeline.options import UnitPolicy
from sp_lightning.pipeline.torch_private import is_compiled, without_compile
from sp_lightning.pipeline.units.tree import Atom, Tree

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_READS_ITS_CHILDREN = (nn.MultiheadAttention,)  # uses `out_proj.weight` without calling `out_proj`
TYPICAL_UNIT_COUNT = 12  # outside of lists, modules up to 1/12 of the model stay whole
_SMALL_LEAF_DIVISOR = 50  # leaves below 1/50 of the model are not worth streaming on their own,
_SMALL_LEAF_BYTES = 256 << 20  # unless they are larger than this: a large model's embedding would fill a small device


def atoms_by_structure(tree: Tree, largest: int | None) -> list[Atom]:
    """Find the modules that are not divided further, in the order of the tree."""
    atoms = _Descent(tree, largest, small=min(tree.total // _SMALL_LEAF_DIVISOR, _SMALL_LEAF_BYTES)).atoms()
    keys = {id(p) for atom in atoms for p in atom.module.parameters() if id(p) in tree.weights}
    if sum(tree.weights[key].nbytes for key in keys) < 0.9 * tree.total:  # many small leaves add up: stream them too
        atoms = _Descent(tree, largest, small=0).atoms()
    return atoms


def atoms_by_policy(tree: Tree, policy: UnitPolicy) -> list[Atom]:
    """Find the modules that the user's policy selects, in the order of the tree.

    Raises:
        ValueError: If it selects nothing that could stream.
    """
    matches = _as_predicate(policy)
    atoms: list[Atom] = []
    covered: set[int] = set()
    matched = False
    for name, module in tree.root.named_modules():
        inner = without_compile(module)
        is_root = inner is without_compile(tree.root)
        if id(inner) in covered or is_root or not matches(name, inner):
            continue
        covered |= {id(part) for part in module.modules()}
        if tree.may_be_member(module):
            matched = matched or any(id(parameter) in tree.weights for parameter in module.parameters())
            if tree.bytes_of(module):
                atoms.append(Atom(name, module))
    if not matched and tree.total:
        classes = Counter(type(module).__name__ for module in tree.root.modules())
        common = ", ".join(name for name, _ in classes.most_common(8))
        raise ValueError(
            f"`units={policy!r}` matches no module of `{type(tree.root).__name__}` that is called and has "
            f"weights to stream. Its most frequent module classes are: {common}."
        )
    return atoms


class _Descent:
    """A walk down a tree that collects atoms.

    Modules with more than `largest` bytes are divided where they can be; leaves outside of lists with less than `small`
    are left out.
    """

    def __init__(self, tree: Tree, largest: int | None, small: int) -> None:
        self._tree = tree
        self._largest = largest
        self._small = small
        self._seen: set[int] = set()

    def atoms(self) -> list[Atom]:
        return self._divide(Atom("", self._tree.root), is_block=False)

    def _divide(self, here: Atom, is_block: bool) -> list[Atom]:
        module, inner = here.module, without_compile(here.module)
        nbytes = self._tree.bytes_of(module)
        if nbytes == 0 or id(module) in self._tree.resident_modules or id(inner) in self._seen:
            return []
        self._seen.add(id(inner))
        children = self._tree.streamable_children(module)
        if not children:
            return [here] if self._tree.may_be_member(module) and (is_block or nbytes >= self._small) else []
        if self._stays_whole(module, is_block):
            return [here]
        children_are_blocks = isinstance(inner, _LISTS) and len(children) > 1
        atoms: list[Atom] = []
        for name, child in children:
            full_name = f"{here.name}.{name}" if here.name else name
            atoms += self._divide(Atom(full_name, child), children_are_blocks)
        return atoms

    def _stays_whole(self, module: nn.Module, is_block: bool) -> bool:
        tree, nbytes = self._tree, self._tree.bytes_of(module)
        if isinstance(without_compile(module), _READS_ITS_CHILDREN):
            return True
        if module is tree.root or not tree.may_be_member(module):
            return False
        if self._largest is not None and nbytes > self._largest:
            return False
        if self._only_calls_blocks(module):
            return False
        if is_block:
            return 4 * nbytes <= tree.total or not self._has_blocks(module)
        return nbytes * TYPICAL_UNIT_COUNT <= tree.total

    def _only_calls_blocks(self, module: nn.Module) -> bool:
        """Tell whether it does nothing but call blocks, each of which can then recompute its activations by itself."""
        if type(module) is not nn.Sequential or is_compiled(module):
            return False
        return len(module) > 1 and all(map(self._tree.streamable_children, module))

    def _has_blocks(self, module: nn.Module) -> bool:
        """Tell whether it is a list, or has a list of blocks inside; a list of leaves (an MLP) inside is not one."""
        children_of = self._tree.streamable_children
        return any(
            isinstance(inner, _LISTS)
            and len(children) > 1
            and (inner is without_compile(module) or any(children_of(child) for _, child in children))
            for inner in module.modules()
            for children in [children_of(inner)]
        )


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
