"""Weights that several modules have: leaves that share one are a unit together, what blocks share is resident."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline.division.parameters import named_own_parameters
from sp_lightning.pipeline.division.tree import Atom, Tree


def put_together(tree: Tree, atoms: Sequence[Atom]) -> tuple[list[list[Atom]], set[int]]:
    """Atoms that share a weight are put in one part, at the place of the first of them (a tied embedding and head).

    Returns:
        The parts; and the weights, by the identity of the parameter, for which that is not to be done.
    """
    elsewhere = _used_elsewhere(tree, atoms)
    together: list[set[int]] = []
    resident = set(elsewhere)
    for parameter, numbers in _users(tree, atoms).items():
        if parameter in elsewhere or parameter in tree.resident_weights or len(numbers) < 2:
            continue
        if any(tree.parts(atoms[number].module) for number in numbers):
            resident.add(parameter)
            continue
        overlapping = [group for group in together if group & numbers]
        together = [group for group in together if group not in overlapping]
        together.append(numbers.union(*overlapping))
    return _parts(atoms, together), resident


def _users(tree: Tree, atoms: Sequence[Atom]) -> dict[int, set[int]]:
    """For each weight the numbers of the atoms that have it."""
    users: dict[int, set[int]] = {}
    for number, atom in enumerate(atoms):
        for parameter in {id(p) for p in atom.module.parameters() if id(p) in tree.weights}:
            users.setdefault(parameter, set()).add(number)
    return users


def _used_elsewhere(tree: Tree, atoms: Sequence[Atom]) -> set[int]:
    """Weights that a module outside of all atoms owns."""
    inside = {id(module) for atom in atoms for module in atom.module.modules()}
    return {
        id(parameter)
        for _, owner, _, parameter in named_own_parameters(tree.root)
        if id(owner) not in inside and id(parameter) in tree.weights
    }


def _parts(atoms: Sequence[Atom], together: Sequence[set[int]]) -> list[list[Atom]]:
    """Atoms one by one, but for those that belong together."""
    first_of = {min(numbers): sorted(numbers) for numbers in together}
    in_a_group = set().union(*together)
    return [
        [atoms[other] for other in first_of.get(number, [number])]
        for number in range(len(atoms))
        if number not in in_a_group or number in first_of
    ]
