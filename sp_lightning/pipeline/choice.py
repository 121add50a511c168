"""`activations="auto"`: for each unit the cheapest way to have its activations in backward, so that all of them fit.

[Note: the peak]
From its forward to its backward a unit holds something: all that it saved, or its inputs alone. While it computes, in
forward and in backward, more of it is there. Units before it in the forward hold theirs all that time, units after it
nothing any more, or nothing yet. So the peak is the largest, over all units, of what the units before one hold plus
what that one needs to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sp_lightning.pipeline.options import ActivationPolicy

_MOST_STATES = 2000  # far more than a model of equal blocks has; beyond it the choice is very nearly the cheapest


@dataclass(frozen=True)
class Way:
    """One way for one unit.

    Args:
        policy: What happens to its activations.
        held: Bytes on the device from its forward to its backward.
        working: Bytes on the device while it computes.
        seconds: What it costs.
    """

    policy: ActivationPolicy
    held: int
    working: int
    seconds: float


class _State(NamedTuple):
    """A choice for the first units: what they hold, what they cost, and the last of them."""

    held: int
    seconds: float
    way: Way | None
    before: _State | None


def peak(ways: Sequence[Way]) -> int:
    """The most bytes that are on the device at once, for one way per unit, in the order of the forward."""
    held = most = 0
    for way in ways:
        most = max(most, held + way.working)
        held += way.held
    return most


def choose(units: Sequence[Sequence[Way]], budget: float) -> list[Way]:
    """The cheapest ways whose peak is within the budget, or, if there are none, those that hold least.

    Args:
        units: The ways of each unit, in the order of the forward.
        budget: Bytes.
    """
    states = [_State(0, 0.0, None, None)]
    for ways in units:
        reached = [
            _State(state.held + way.held, state.seconds + way.seconds, way, state)
            for state in states
            for way in ways
            if state.held + way.working <= budget
        ]
        states = _worth_keeping(reached)
        if not states:
            return [min(ways, key=lambda way: (way.held, way.seconds)) for ways in units]
    cheapest: _State | None = min(states, key=lambda state: (state.seconds, state.held))
    chosen = []
    while cheapest is not None and cheapest.way is not None:
        chosen.append(cheapest.way)
        cheapest = cheapest.before
    return chosen[::-1]


def _worth_keeping(states: list[_State]) -> list[_State]:
    """Without those that hold more than another one and cost as much."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    if len(kept) > _MOST_STATES:
        last = len(kept) - 1
        kept = [kept[number * last // (_MOST_STATES - 1)] for number in range(_MOST_STATES)]
    return kept
