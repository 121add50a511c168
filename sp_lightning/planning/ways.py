"""The ways that a unit's activations can go: what each of them holds on the device, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.activations.policy import OFFLOADING, RECOMPUTING, WITHOUT_RECOMPUTING
from sp_lightning.pipeline.options import Policy
from sp_lightning.planning.cost import Machine, UnitWork, Way
from sp_lightning.planning.memory import peak

# the part of its time that a copy of activations costs even if computing hides it
_HIDDEN_COST = 0.1


def ways_of(
    unit: UnitWork,
    calls: Sequence[Footprint],
    second_forward: float,
    machine: Machine | None,
    inputs_stay: bool = False,
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members, as far as they can follow.

    Its second forward takes so many seconds. Without a machine, whose copies cost something, nothing can be offloaded.
    If `inputs_stay`, those of the first member are the batch, which whoever runs the step holds.
    """
    policies: tuple[Policy, ...] = get_args(Policy)
    ways: dict[tuple[int, int], Way] = {}
    for policy in policies:
        if machine is None and policy in OFFLOADING:
            continue
        members = [_way_of(calls[0], policy, inputs_stay)]
        members += [_way_of(call, policy, inputs_stay=False) for call in calls[1:]]
        held = sum(way.held for way in members)
        leaving = sum(way.leaving for way in members)
        repeats = any(way.policy in RECOMPUTING for way in members)
        repeating = second_forward if repeats else 0.0
        seconds = repeating
        if machine is not None and leaving:
            seconds += _offload_seconds(machine, unit, leaving, repeating)
        under_way = members[-1].under_way
        way = Way(policy, held, peak(members), seconds, leaving, under_way, repeating)
        ways.setdefault((held, leaving), way)
    return tuple(ways.values())


def _offload_seconds(machine: Machine, unit: UnitWork, nbytes: int, repeating: float) -> float:
    """Return what it costs to have so many bytes of a unit's activations wait on the host.

    Its forward hides their way out. Its backward, in which it computes for so many more seconds if its forward runs
    again, hides the way back of them and of its weights.
    """
    backward = unit.backward_seconds + repeating
    sending = max(0.0, machine.down(nbytes) - unit.forward_seconds)
    waiting_anyway = max(0.0, machine.up(unit.weight_bytes) - backward)
    fetching = max(0.0, machine.up(unit.weight_bytes + nbytes) - backward) - waiting_anyway
    return sending + fetching + _HIDDEN_COST * (machine.up(nbytes) + machine.down(nbytes))


def _way_of(call: Footprint, policy: Policy, inputs_stay: bool) -> Way:
    """Return the way of a member's activations, without what it costs."""
    followed = policy if call.repeatable else WITHOUT_RECOMPUTING.get(policy, policy)
    inputs = 0 if inputs_stay else call.held
    held = call.held
    if followed not in RECOMPUTING:
        held += call.saved
    leaving = 0
    if followed == "offload":
        leaving = min(call.large, inputs + call.saved)
    elif followed == "recompute_offload":
        leaving = inputs
    return Way(followed, held - leaving, call.working, 0.0, leaving, under_way=leaving)
