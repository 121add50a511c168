"""Weights that several modules share: leaves that share one form a unit, and what blocks share is resident."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline.units.parameters import named_own_parameters
from sp_lightning.pipeline.units.tree import Atom, Tree


def join_sharing(tree: Tree, atoms: Sequence[Atom]) -> tuple[list[list[Atom]], set[int]]:
    """Join atoms that share a weight (a tied embedding and head) into one part, at the position of the first of them.

    Returns:
        The parts, and the shared weights that are resident instead, by the identity of the parameter.
    """
    owned_outside = _owned_outside(tree, atoms)
    together: list[set[int]] = []
    resident = set(owned_outside)
    for parameter, numbers in _atoms_with(tree, atoms).items():
        if parameter in owned_outside or parameter in tree.resident_weights or len(numbers) < 2:
            continue
        if any(tree.streamable_children(atoms[number].module) for number in numbers):
            resident.add(parameter)
            continue
        overlapping = [others for others in together if others & numbers]
        together = [others for others in together if others not in overlapping]
        together.append(numbers.union(*overlapping))
    return _parts(atoms, together), resident


def _atoms_with(tree: Tree, atoms: Sequence[Atom]) -> dict[int, set[int]]:
    """Return, for each weight, the numbers of the atoms that have it."""
    numbers: dict[int, set[int]] = {}
    for number, atom in enumerate(atoms):
        for parameter in {id(p) for p in atom.module.parameters() if id(p) in tree.weights}:
            numbers.setdefault(parameter, set()).add(number)
    return numbers


def _owned_outside(tree: Tree, atoms: Sequence[Atom]) -> set[int]:
    """Return the weights that a module outside of all atoms owns."""
    inside = {id(module) for atom in atoms for module in atom.module.modules()}
    return {
        id(parameter)
        for _, owner, parameter in named_own_parameters(tree.root)
        if id(owner) not in inside and id(parameter) in tree.weights
    }


def _parts(atoms: Sequence[Atom], together: Sequence[set[int]]) -> list[list[Atom]]:
    """Return one part for each atom, except that atoms which belong together form one."""
    first_of = {min(numbers): sorted(numbers) for numbers in together}
    joined = set().union(*together)
    return [
        [atoms[other] for other in first_of.get(number, [number])]
        for number in range(len(atoms))
        if number not in joined or number in first_of
    ]
