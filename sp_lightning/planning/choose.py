"""The search for the choice with the fastest step, among all that fit the budget (docs/planning.md).

A cost is a formula, so all choices that matter are tried: splits of the budget between activations and weights, each
with the cheapest policies for its share; numbers of units that live on the device; windows. What memory is left is
filled with units that are kept there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from sp_lightning.pipeline.activations.policy import OFFLOADING, RECOMPUTING
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.cost import (
    Choice,
    Machine,
    Prediction,
    Way,
    Workload,
    activation_bytes,
    gradient_bytes,
    peak,
    predict,
    weight_bytes,
)

_Number: TypeAlias = int | Literal["auto"]

_SHARES = 12  # numbers of units on the device to try, evenly apart
_SPLITS = 4  # splits of the budget between activations and weights to try
_K_PRIMES = (1, 2, 4)
_LEFT_OUT: tuple[tuple[Policy, ...], ...] = ((), OFFLOADING, RECOMPUTING)
_MARGIN = 1.02  # a window that fetches nothing ahead, or units on the device, have to be faster by this factor
_PRICE_OF_WORK = 0.01  # what a second of work in any lane is taken to cost, so that of equal choices the laziest wins
_MOST_STATES = 256  # far more than a model of equal blocks has; beyond it the choice is very nearly the cheapest


class TooLittleMemory(ValueError):
    """Nothing fits, not even what takes least."""

    def __init__(self, budget: int, missing: int) -> None:
        has, more = readable_bytes(budget), readable_bytes(missing)
        super().__init__(f"{has} of device memory is too little: it takes {more} more.")
        self.missing = missing  # bytes


def choose(
    workload: Workload,
    machine: Machine,
    budget: int,
    *,
    k: _Number = "auto",
    k_prime: _Number = "auto",
    fill: bool = True,
) -> Prediction:
    """Predict the fastest step within a budget of device memory, with its choice.

    `k` and `k_prime` may be fixed; without `fill`, no units are kept on the device, or live there. If nothing fits, it
    raises `TooLittleMemory`.
    """
    windows = list(_windows(len(workload.units), k, k_prime, machine))
    smallest = min(windows, key=lambda window: weight_bytes(workload, window))
    least = tuple(choose_ways([unit.ways for unit in workload.units], 0, workload.turn_bytes))
    spare = _room(workload, budget, least) - weight_bytes(workload, smallest)
    if spare < 0:
        raise TooLittleMemory(budget, -spare)
    splits = dict.fromkeys([least, *_splits(workload, activation_bytes(workload, least) + spare)])
    found = []
    for on_device in _sets_on_device(workload) if fill else [()]:
        streamed = workload.with_on_device(on_device)
        for ways in splits:
            room = _room(streamed, budget, ways)
            for window in windows if weight_bytes(streamed, smallest) <= room else ():
                choice = replace(window, ways=ways)
                if weight_bytes(streamed, choice) <= room:
                    for each in dict.fromkeys([choice, _filled(streamed, choice, room) if fill else choice]):
                        found.append(predict(workload, machine, replace(each, on_device=on_device)))
    return min(found, key=_price)


def _price(prediction: Prediction) -> float:
    """Return what choices are compared by: the time of a step, and how easily it is delayed."""
    choice, seconds = prediction.choice, prediction.seconds + _PRICE_OF_WORK * sum(prediction.lanes.values())
    return seconds * (_MARGIN if choice.slots == 1 else 1.0) * (_MARGIN if choice.on_device else 1.0)


def _room(workload: Workload, budget: int, ways: Sequence[Way]) -> int:
    """Return the bytes that are left for weights."""
    return budget - workload.reserve_bytes - gradient_bytes(workload) - activation_bytes(workload, ways)


def _windows(units: int, k: _Number, k_prime: _Number, machine: Machine) -> Iterator[Choice]:
    """Yield the windows that are worth a try; moving units together only helps if each copy has a constant cost."""
    together: Sequence[int] = _K_PRIMES if machine.copy_seconds else _K_PRIMES[:1]
    for number in together if k_prime == "auto" else (k_prime,):
        if k != "auto":
            if number <= k:
                yield Choice(k, number)
            continue
        slots = 1
        while slots * number < units:
            yield Choice(slots * number, number)
            slots += max(1, slots // 4)
        yield Choice(max(units, number), number)


def _sets_on_device(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Yield units that may live on the device, from none to all in a few steps."""
    able = [number for number, unit in enumerate(workload.units) if unit.bytes_on_device]
    for count in {*range(0, len(able), max(1, len(able) // _SHARES)), len(able)}:
        yield _spread(count, able)


def _spread(count: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return so many of these numbers, spread evenly."""
    return tuple(numbers[(2 * place + 1) * len(numbers) // (2 * count)] for place in range(count))


def _splits(workload: Workload, most: int) -> Iterator[tuple[Way, ...]]:
    """Yield ways for all units: the cheapest ones within several shares of the memory for activations.

    What they cost depends on how busy the lanes are, so they are also searched without offloading, or recomputing.
    """
    turn, most = workload.turn_bytes, most - workload.outside_bytes
    for left_out in _LEFT_OUT if workload.trains else ():
        units = [tuple(way for way in unit.ways if way.policy not in left_out) or unit.ways for unit in workload.units]
        enough = min(most, peak([max(ways, key=lambda way: way.held) for ways in units], turn))
        least = min(enough, peak([min(ways, key=lambda way: way.held + way.under_way) for ways in units], turn))
        for split in {enough - (enough - least) * number // (_SPLITS - 1) for number in range(_SPLITS)}:
            yield tuple(choose_ways(units, split, turn))


def _filled(workload: Workload, choice: Choice, room: int) -> Choice:
    """Return the choice with as many units kept on the device as fit, spread evenly among those that stream."""
    streamed = [number for number, unit in enumerate(workload.units) if unit.weight_bytes]

    def with_kept(count: int) -> Choice:
        return replace(choice, kept=_spread(count, streamed))

    counts = range(max(0, len(streamed) - choice.k) + 1)
    return with_kept(bisect_right(counts, room, key=lambda count: weight_bytes(workload, with_kept(count))) - 1)


class _State(NamedTuple):
    """A choice for the first units: what they hold, cost and have under way, the last way, and the state before it."""

    held: int
    seconds: float
    under_way: int
    way: Way | None
    before: _State | None


def choose_ways(units: Sequence[Sequence[Way]], budget: int, turn: int = 0) -> list[Way]:
    """Return the cheapest ways whose peak is within the budget or, if there are none, those with the lowest peak."""
    units = [*units, [Way("keep", 0, turn, 0.0)]]
    chosen = _cheapest(units, budget)
    if chosen is None:
        least = _least_budget(units, budget)
        chosen = _cheapest(units, least) or _cheapest(units, least, price=0)
    assert chosen is not None
    return chosen[:-1]


def _least_budget(units: Sequence[Sequence[Way]], too_little: int) -> int:
    """Return the smallest budget that some ways stay within, by halving what is in question."""
    enough = sum(max(way.held + way.under_way + way.working for way in ways) for ways in units)
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if _cheapest(units, middle, price=0) is None:
            too_little = middle
        else:
            enough = middle
    return enough


def _cheapest(units: Sequence[Sequence[Way]], budget: int, price: int = 1) -> list[Way] | None:
    """Return the cheapest ways within a budget; those that hold least if seconds cost nothing, which is soon found."""
    states = [_State(0, 0.0, 0, None, None)]
    for ways in units:
        reached = [
            _State(state.held + way.held, state.seconds + price * way.seconds, way.under_way, way, state)
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
