"""Twins into the module tree, masters back: a module that computes reads its weights on the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sp_lightning.pipeline.torch_private import storage_key, without_torch_function
from sp_lightning.pipeline.weights.units import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight


def swap_in(member: Member, prepare: Callable[[Twin], None]) -> None:
    """Put twins in place of the masters.

    Args:
        member: The member that is about to compute, as a whole or in parts.
        prepare: Called with each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
    """
    with without_torch_function():
        for entry in member.entries:
            weight = entry.weight
            twin = weight.twin
            if twin.parameter.requires_grad != weight.master.requires_grad:
                prepare(twin)
            if entry.current is weight.master:  # else `functional_call` has put another tensor there
                entry.current = twin.parameter
    for module, weights in member.recurrent:
        present = {id(entry.weight): entry.current for entry in member.entries}
        module._flat_weights = [present[id(weight)] for weight in weights]


def swap_out(member: Member) -> None:
    """Put the masters back; what is neither a twin nor a master is the user's and stays."""
    for entry in member.entries:
        weight = entry.weight
        current = entry.current
        if current is not None and current is not weight.master and _is_twin(current, weight, member):
            entry.current = weight.master
    for module, weights in member.recurrent:
        module._flat_weights = [weight.master for weight in weights]


def _is_twin(parameter: nn.Parameter, weight: Weight, member: Member) -> bool:
    return parameter is weight.twin.parameter or storage_key(parameter) in member.twins


def leave_unit(unit: Unit) -> None:
    """Put the masters back into a unit that backward has reached, but for its calls that are running."""
    unit.is_reached = False
    for member in unit.members:
        if not member.running_calls:
            swap_out(member)
