"""Twins into the module tree, masters back: a module that computes reads its weights on the device."""

from __future__ import annotations

from collections.abc import Callable

from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.weights.units import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin


def swap_in(member: Member, prepare: Callable[[Twin], None]) -> None:
    """Put twins in place of the masters. Masters are read, so the guard must not look.

    Args:
        member: The member that is about to compute, as a whole or in parts.
        prepare: Called with each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
    """
    for entry in member.entries:
        twin, master = entry.weight.twin, entry.weight.master
        if twin.parameter.requires_grad != master.requires_grad:
            prepare(twin)
        if entry.current is master:  # else `functional_call` has put another tensor there
            entry.current = twin.parameter
    for module, weights in member.recurrent:
        present = {id(entry.weight): entry.current for entry in member.entries}
        module._flat_weights = [present[id(weight)] for weight in weights]


def swap_out(member: Member) -> None:
    """Put the masters back; what is neither a twin nor a master is the user's and stays."""
    for entry in member.entries:
        current, master = entry.current, entry.weight.master
        if current is entry.weight.twin.parameter:
            entry.current = master
        elif current is not None and current is not master and storage_key(current) in member.twins:
            entry.current = master  # an earlier twin's, of a weight that is a device parameter by now
    for module, weights in member.recurrent:
        module._flat_weights = [weight.master for weight in weights]


def leave_unit(unit: Unit) -> None:
    """Put the masters back into a unit that backward has reached, but for its calls that are running."""
    unit.is_reached = False
    for member in unit.members:
        if not member.running_calls:
            swap_out(member)
