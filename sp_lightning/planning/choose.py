"""The search for the choice with the fastest step, among all that fit the budget (docs/planning.md).

A cost is a formula, so all choices that matter are tried: splits of the budget between activations and weights, each
with the cheapest policies for its share; numbers of units that live on the device; windows. What memory is left is
filled with units that are kept there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from sp_lightning.pipeline.activations.policy import OFFLOADING, RECOMPUTING
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.cost import Choice, Machine, Prediction, Way, Workload
from sp_lightning.planning.memory import activation_bytes, device_bytes, gradient_bytes, peak, weight_bytes
from sp_lightning.planning.step import predict_placed

_Number: TypeAlias = int | Literal["auto"]

_SHARES = 12  # numbers of units on the device to try, evenly apart
_SPLITS = 4  # splits of the budget between activations and weights to try
# numbers of units that visit to try, as parts of what would keep visits as busy as the host
_OF_BALANCE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)
_FEW_SLOTS = (1, 2, 4)  # of windows to try with units that live on the device or visit
_THOROUGHLY = 8  # windows to try with all ways for activations
_PROMISING = 3  # placements to try further: with all windows, and with visits
_K_PRIMES = (1, 2, 4)
_LEFT_OUT: tuple[tuple[Policy, ...], ...] = ((), OFFLOADING, RECOMPUTING)
# a window that fetches nothing ahead, or units that live on the device or visit, have to be faster by this factor
_MARGIN = 1.02
# of choices that are slower than the fastest one by at most this factor, the laziest wins
_NEARLY = 1.01
# far more than a model of equal blocks has; beyond it the choice is very nearly the cheapest
_MOST_STATES = 256


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
    placement: Choice | None = None,
) -> Prediction:
    """Predict the fastest step within a budget of device memory, with its choice.

    `k` and `k_prime` may be fixed; without `fill`, no units are kept on the device, live there or visit. Those that do
    may be given by a `placement`. If nothing fits, it raises `TooLittleMemory`.
    """
    windows = list(_windows(len(workload.units), k, k_prime, machine))
    budget_left = budget - workload.reserve_bytes
    least = choose_ways(tuple(unit.ways for unit in workload.units), 0, workload.turn_bytes)
    streaming = workload.placed(placement or Choice(1))
    spare = budget_left - min(device_bytes(streaming, window, least) for window in windows)
    if spare < 0:
        raise TooLittleMemory(budget, -spare)
    splits = [[least], *_splits(workload, activation_bytes(streaming, least) + spare)]
    search = _Search(workload, machine, budget_left, splits, fill)
    predictions = search.predictions(placement or Choice(1), windows)
    predictions.sort(key=_seconds_with_margin)
    best_windows = dict.fromkeys(Choice(each.choice.k, each.choice.k_prime) for each in predictions)
    predictions += search.predictions(placement or Choice(1), [*best_windows][:_THOROUGHLY], is_thorough=True)
    fastest = [_best(predictions)]
    if placement is not None or not fill:
        return fastest[0]
    few = [fastest[0].choice, *(window for window in windows if window.slots in _FEW_SLOTS)]
    streamed = fastest[0]
    fastest += search.promising([Choice(1, on_device=living) for living in _sets_on_device(workload)], few)
    predictions += fastest
    fastest.sort(key=_seconds_with_margin)
    for choice in dict.fromkeys([streamed.choice, *(prediction.choice for prediction in fastest[:_PROMISING])]):
        alone = [window for window in (choice, *few[1:]) if window.k_prime == 1]
        sets = _sets_that_visit(workload, machine, choice)
        predictions += search.promising([replace(choice, visiting=visiting) for visiting in sets], alone)
    return _best(predictions)


class _Search:
    """Predicts choices that fit a budget; if it is to `fill` that, also with units that are kept on the device.

    `splits` are lists of ways for activations, each from the fastest to the thriftiest ones.
    """

    def __init__(
        self, workload: Workload, machine: Machine, budget: int, splits: Sequence[Sequence[tuple[Way, ...]]], fill: bool
    ) -> None:
        self._workload = workload
        self._machine = machine
        self._budget = budget
        self._splits = splits
        self._fill = fill

    def promising(self, placements: Iterable[Choice], windows: Sequence[Choice]) -> list[Prediction]:
        """Return the best prediction for each placement that fits: with all windows for the most promising ones."""
        found = []
        for placement in placements:
            predicted = next(filter(None, (self.predictions(placement, [window]) for window in windows)), None)
            if predicted:
                found.append(_best(predicted))
        found.sort(key=_seconds_with_margin)
        for number, prediction in enumerate(found[:_PROMISING]):
            found[number] = _best([prediction, *self.predictions(prediction.choice, windows)])
        return found

    def predictions(self, placement: Choice, windows: Iterable[Choice], is_thorough: bool = False) -> list[Prediction]:
        """Predict windows with units that live or visit as in a placement.

        If it is not thorough, each window has the fastest ways of each list that fit.
        """
        workload = self._workload.placed(placement)
        room = self._budget - gradient_bytes(workload)
        if room < workload.on_device_bytes:
            return []
        taken = {ways: activation_bytes(workload, ways) for split in self._splits for ways in split}
        choices: dict[Choice, None] = {}  # a set that keeps the order
        for window in windows:
            window = Choice(window.k, window.k_prime, (), (), placement.on_device, placement.visiting)
            left = room - weight_bytes(workload, window)
            for split in self._splits:
                fitting = [ways for ways in split if taken[ways] <= left]
                tried = fitting if is_thorough else fitting[:1]
                if self._fill and fitting and fitting[0] is not split[0]:
                    faster = split[split.index(fitting[0]) - 1]
                    tried = [*tried, _mixed(workload, fitting[0], faster, left)]
                for ways in tried:
                    choice = replace(window, ways=ways)
                    if is_thorough or not self._fill:
                        choices[choice] = None
                    if self._fill:
                        choices[_filled(workload, choice, room - activation_bytes(workload, ways))] = None
        return [predict_placed(workload, self._machine, choice) for choice in choices]


def _mixed(workload: Workload, ways: tuple[Way, ...], faster: tuple[Way, ...], budget: int) -> tuple[Way, ...]:
    """Return the ways with as many units' faster ones as fit a budget, those of the last units."""
    fitting, too_many = 0, len(ways)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if activation_bytes(workload, (*ways[:-middle], *faster[-middle:])) <= budget:
            fitting = middle
        else:
            too_many = middle
    return (*ways[:-fitting], *faster[-fitting:]) if fitting else ways


def _best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the fastest prediction or, of those that are nearly as fast, the one with the least work."""
    enough = _NEARLY * min(map(_seconds_with_margin, predictions))
    nearly_fastest = [prediction for prediction in predictions if _seconds_with_margin(prediction) <= enough]
    return min(nearly_fastest, key=lambda prediction: sum(prediction.lanes.values()))


def _seconds_with_margin(prediction: Prediction) -> float:
    choice = prediction.choice
    return prediction.seconds * (_MARGIN if choice.slots == 1 or choice.on_device or choice.visiting else 1.0)


def _windows(units: int, k: _Number, k_prime: _Number, machine: Machine) -> Iterator[Choice]:
    """Yield the windows that are worth a try.

    Moving units together only helps if each copy has a constant cost, or with one place for few units that are uneven.
    """
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
        for most in (units - number, units):
            yield Choice(max(most, number), number)
    if len(together) == 1 and k == k_prime == "auto":
        yield from (Choice(number, number) for number in _K_PRIMES[1:] if number <= units)


def _sets_on_device(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Yield units that may live on the device, from one to all in a few steps, with what is resident or without.

    Spread evenly, they leave the others' loads time to be hidden; as the first ones they compute while the host steps
    the others, so that the last ones are the first to go when memory runs short.
    """
    units = len(workload.units)
    able = [number for number, unit in enumerate(workload.everything) if unit.bytes_on_device]
    if workload.lives_whole or not able:
        if able:
            yield tuple(able)
        return
    in_order = [number for number in able if number < units]
    resident = tuple(able[len(in_order) :])
    counts = {*range(0, len(in_order), max(1, len(in_order) // _SHARES)), len(in_order)}
    for count in sorted(counts):
        for living in dict.fromkeys([_spread(count, in_order), tuple(in_order[:count])]):
            if living or resident:
                yield living + resident


def _sets_that_visit(workload: Workload, machine: Machine, choice: Choice) -> Iterator[tuple[int, ...]]:
    """Yield streamed units that visit: around as many as are done when the host has stepped the others."""
    able = [number for number, unit in enumerate(workload.units) if unit.visit_up and number not in choice.on_device]
    if not able:
        return
    units = [workload.units[number] for number in able]
    on_host = sum(map(machine.step, units))
    as_visits = sum(machine.visit(unit.visit_up, unit.visit_down) for unit in units)
    balance = len(able) * on_host / (on_host + as_visits) if on_host else 0.0
    counts = {min(len(able), round(share * balance)) for share in _OF_BALANCE} | {len(able)}
    for count in sorted(counts - {0}):
        yield _spread(count, able)


def _spread(count: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return so many of these numbers, spread evenly."""
    return tuple(numbers[(2 * place + 1) * len(numbers) // (2 * count)] for place in range(count))


def _splits(workload: Workload, most: int) -> Iterator[list[tuple[Way, ...]]]:
    """Yield lists of ways for all units: the cheapest ones within several shares of the memory for activations.

    What they cost depends on how busy the lanes are, so they are also searched without offloading, or recomputing.
    """
    turn, most = workload.turn_bytes, most - workload.outside_bytes
    for left_out in _LEFT_OUT if workload.trains else ():
        units = [tuple(way for way in unit.ways if way.policy not in left_out) or unit.ways for unit in workload.units]
        enough = min(most, peak([max(ways, key=lambda way: way.held) for ways in units], turn))
        least = min(enough, peak([min(ways, key=lambda way: way.held + way.under_way) for ways in units], turn))
        shares = [enough - (enough - least) * number // (_SPLITS - 1) for number in range(_SPLITS)]
        yield [choose_ways(tuple(units), share, turn) for share in dict.fromkeys(shares)]


def _filled(workload: Workload, choice: Choice, room: int) -> Choice:
    """Return the choice with as many units kept on the device as fit, spread evenly among those that stream."""
    streamed = [number for number, unit in enumerate(workload.units) if unit.weight_bytes]
    too_many = max(0, len(streamed) - choice.k) + 1
    fitting = choice
    count = 0
    while too_many - count > 1:
        middle = (count + too_many) // 2
        fuller = replace(choice, kept=_spread(middle, streamed))
        if weight_bytes(workload, fuller) <= room:
            count = middle
            fitting = fuller
        else:
            too_many = middle
    return fitting


class _State(NamedTuple):
    """A choice for the first units: what they hold, cost and have under way, the last way, and the state before it."""

    held: int
    cost: float
    under_way: int
    way: Way | None
    before: _State | None


@lru_cache(128)  # a plan asks several times for the same, for each way to keep masters say
def choose_ways(units: tuple[tuple[Way, ...], ...], budget: int, turn: int = 0) -> tuple[Way, ...]:
    """Return the cheapest ways whose peak is within the budget or, if there are none, those with the lowest peak."""
    at_turn = Way("keep", 0, turn, 0.0)
    units = (*units, (at_turn,))
    chosen = _cheapest(units, budget)
    if chosen is None:
        lowest = _cheapest(units, None)
        assert lowest is not None
        chosen = _cheapest(units, peak(lowest)) or lowest
    return tuple(chosen[:-1])


def _cheapest(units: Sequence[Sequence[Way]], budget: int | None) -> list[Way] | None:
    """Return the ways that cost least time within a budget, if there are any; without one, those whose peak is lowest.

    From unit to unit, it goes on with each state that no other one is better than.
    """
    states = [_State(0, 0.0, 0, None, None)]
    for ways in units:
        reached = []
        for state, way in product(states, ways):
            needed = state.held + state.under_way + way.working
            if budget is None or needed <= budget:
                cost = max(state.cost, needed) if budget is None else state.cost + way.seconds
                reached.append(_State(state.held + way.held, cost, way.under_way, way, state))
        states = _undominated(reached)
        if not states:
            return None
    last: _State | None = min(states, key=lambda state: (state.cost, state.held))
    chosen = []
    while last is not None and last.way is not None:
        chosen.append(last.way)
        last = last.before
    return chosen[::-1]


def _undominated(states: list[_State]) -> list[_State]:
    """Leave out each state that another one is at least as good as in every respect."""
    kept: list[_State] = []
    least: dict[int, float] = {}  # cost, by what is under way, among those that hold no more
    for state in sorted(states, key=lambda state: state[:3]):
        if all(state.cost < cost for under_way, cost in least.items() if under_way <= state.under_way):
            kept.append(state)
            least[state.under_way] = state.cost
    if len(kept) > _MOST_STATES:
        last = len(kept) - 1
        kept = [kept[number * last // (_MOST_STATES - 1)] for number in range(_MOST_STATES)]
    return kept
