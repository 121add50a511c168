"""`activations="auto"`: for each unit the cheapest way to have its activations in backward, so that all of them fit.

[Note: the peak]
From its forward to its backward a unit holds something: all that it saved, or its inputs alone, or next to nothing if
these wait on the host. While it computes, in forward and in backward, it takes more. Meanwhile the units before it hold
theirs, and those after it hold nothing yet, or nothing any more. What the unit before it saved may still be leaving for
the host, or be coming back already. So the peak is the largest, over all units, of what the units before one hold, what
of the last of them is under way, and what that one needs to compute; or, at the turn from forward to backward, what all
units hold and what is taken after them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sp_lightning.pipeline.options import Policy

_MOST_STATES = 256  # far more than a model of equal blocks has; beyond it the choice is very nearly the cheapest


@dataclass(frozen=True)
class Way:
    """One way for a unit to have its activations in backward."""

    policy: Policy
    held: int  # bytes on the device from its forward to its backward
    working: int  # bytes on the device while it computes
    seconds: float  # that it costs
    leaving: int = 0  # bytes that go to the host, and come back in backward
    under_way: int = 0  # of these, bytes that are on the device while the next unit computes
    repeating: float = 0.0  # the part of the time in which its forward runs again


class _State(NamedTuple):
    """A choice for the first units: what they hold, cost and have under way, the last way, and the state before it."""

    held: int
    seconds: float
    under_way: int
    way: Way | None
    before: _State | None


def peak(ways: Sequence[Way], turn: int = 0) -> int:
    """Return the most bytes that are on the device at once, if so many are taken at the turn; see [Note: the peak]."""
    held = most = under_way = 0
    for way in ways:
        most = max(most, held + under_way + way.working)
        held += way.held
        under_way = way.under_way
    return max(most, held + under_way + turn)


def choose_ways(units: Sequence[Sequence[Way]], budget: int, turn: int = 0) -> list[Way]:
    """Return the cheapest ways whose peak is within the budget or, if there are none, those with the lowest peak."""
    units = [*units, [Way("keep", 0, turn, 0.0)]]
    chosen = _cheapest(units, budget)
    if chosen is None:
        enough = sum(max(way.held + way.under_way + way.working for way in ways) for ways in units)
        budgets = range(budget, enough + 1)
        least = bisect_left(budgets, True, key=lambda each: _cheapest(units, each) is not None)
        chosen = _cheapest(units, budgets[least])
    assert chosen is not None
    return chosen[:-1]


def _cheapest(units: Sequence[Sequence[Way]], budget: int) -> list[Way] | None:
    states = [_State(0, 0.0, 0, None, None)]
    for ways in units:
        reached = [
            _State(state.held + way.held, state.seconds + way.seconds, way.under_way, way, state)
            for state in states
            for way in ways
            if state.held + state.under_way + way.working <= budget
        ]
        states = _undominated(reached)
        if not states:
            return None
    last: _State | None = min(states, key=lambda state: (state.seconds, state.held))
    chosen = []
    while last is not None and last.way is not None:
        chosen.append(last.way)
        last = last.before
    return chosen[::-1]


def _undominated(states: list[_State]) -> list[_State]:
    """Leave out each state that another one is at least as good as in every respect."""
    kept: list[_State] = []
    least: dict[int, float] = {}  # seconds, by what is under way, among those that hold no more
    for state in sorted(states, key=lambda state: state[:3]):
        if all(state.seconds < seconds for under_way, seconds in least.items() if under_way <= state.under_way):
            kept.append(state)
            least[state.under_way] = state.seconds
    if len(kept) > _MOST_STATES:
        last = len(kept) - 1
        kept = [kept[number * last // (_MOST_STATES - 1)] for number in range(_MOST_STATES)]
    return kept
