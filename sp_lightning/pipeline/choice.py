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
from typing import Literal, NamedTuple, TypeAlias

Policy: TypeAlias = Literal["keep", "recompute", "offload"]

_MOST_STATES = 256  # far more than a model of equal blocks has; beyond it the choice is very nearly the cheapest


@dataclass(frozen=True)
class Way:
    """One way for one unit.

    Args:
        policy: What happens to its activations.
        held: Bytes on the device from its forward to its backward.
        working: Bytes on the device while it computes.
        seconds: What it costs.
    """

    policy: Policy
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


def choose(units: Sequence[Sequence[Way]], budget: int) -> list[Way]:
    """The cheapest ways whose peak is within the budget, or, if there are none, those whose peak is the lowest.

    Args:
        units: The ways of each unit, in the order of the forward.
        budget: Bytes.
    """
    chosen = _cheapest(units, budget)
    if chosen is not None:
        return chosen
    too_little, enough = budget, sum(max(way.held + way.working for way in ways) for ways in units)
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if _cheapest(units, middle) is None:
            too_little = middle
        else:
            enough = middle
    chosen = _cheapest(units, enough)
    assert chosen is not None
    return chosen


def _cheapest(units: Sequence[Sequence[Way]], budget: int) -> list[Way] | None:
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
            return None
    last: _State | None = min(states, key=lambda state: (state.seconds, state.held))
    chosen = []
    while last is not None and last.way is not None:
        chosen.append(last.way)
        last = last.before
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
