"""The ways that a unit's activations can go: what each of them holds on the device, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.options import Policy
from sp_lightning.planning.memory import peak
from sp_lightning.planning.work import Way


def ways_of(
    calls: Sequence[Footprint], second_forward: float, policies: Sequence[Policy], inputs_stay: bool = False
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members, as far as they can follow.

    Its second forward takes so many seconds. If `inputs_stay`, those of the first member are the batch, which whoever
    runs the step holds.
    """
    ways: dict[tuple[int, int], Way] = {}
    for policy in policies:
        members = [_way_of(call, policy, inputs_stay and call is calls[0]) for call in calls]
        held = sum(way.held for way in members)
        leaving = sum(way.leaving for way in members)
        repeats = any(way.policy == "recompute" for way in members)
        way = Way(
            policy,
            held,
            peak(members),
            leaving,
            under_way=members[-1].under_way,
            repeating=second_forward if repeats else 0.0,
        )
        ways.setdefault((held, leaving), way)
    return tuple(ways.values())


def _way_of(call: Footprint, policy: Policy, inputs_stay: bool) -> Way:
    """Return the way of a member's activations; one that cannot be repeated keeps them."""
    if policy == "recompute" and call.repeatable:
        return Way(policy, call.held, call.working)
    leaving = 0
    if policy == "offload":
        leaving = min(call.large, call.saved + (0 if inputs_stay else call.held))
    return Way("keep", call.held + call.saved - leaving, call.working, leaving, under_way=leaving)
