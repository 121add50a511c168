"""The search for the choice with the fastest step, among all that fit the budget (docs/planning.md).

Activations come first, because they leave few options: some splits of the budget between activations and weights are
tried, each with the cheapest policies for its share (`activations/ways.py`). For each split, every `k` and `k_prime`
worth trying is replayed, with as many units kept on the device as then fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from sp_lightning.pipeline.activations.ways import OFFLOADING, RECOMPUTING, Policy, Way, choose_ways, peak
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.planning.cost import (
    Choice,
    Prediction,
    activation_bytes,
    gradient_bytes,
    least_seconds,
    predict,
    weight_bytes,
)
from sp_lightning.planning.workload import Machine, Workload

_SHARES = 4  # numbers of units on the device to try first, evenly apart
_SPLITS = 6  # splits of the budget between activations and weights to try
_TIE = 1.02  # times within this factor of each other count as the same
_NO_PREFETCH_PENALTY = 1.04  # for windows that fetch nothing ahead: they hide no deviation from the plan
_K_PRIMES = (1, 2, 4)
_LEFT_OUT: tuple[tuple[Policy, ...], ...] = ((), OFFLOADING, RECOMPUTING)
_EVERY_K = 12  # up to here every k is tried, above it only steps of a sixth


class _Candidate(NamedTuple):
    choice: Choice
    prediction: Prediction
    arena_bytes: int  # before spare memory was filled

    @property
    def seconds(self) -> float:
        fetches_ahead = self.choice.k >= 2 * self.choice.k_prime
        return self.prediction.seconds * (1.0 if fetches_ahead else _NO_PREFETCH_PENALTY)

    def rank(self) -> tuple[int, float]:
        """Return the sort key for choices that take the same time: the smallest window first, then the least work."""
        return self.arena_bytes, sum(self.prediction.lanes.values())


def choose(
    workload: Workload,
    machine: Machine,
    budget: int,
    *,
    k: int | Literal["auto"] = "auto",
    k_prime: int | Literal["auto"] = "auto",
    fill: bool = True,
) -> tuple[Choice, Prediction]:
    """Find the choice with the fastest step within the budget; among equally fast ones, that with the smallest window.

    Where units may live on the device, several numbers of them are tried: each leaves a smaller problem of the same
    kind.

    Args:
        workload: The work of a step.
        machine: The machine's speeds.
        budget: Bytes of device memory.
        k: Units on the device at once, if that is fixed.
        k_prime: Units moved together, if that is fixed.
        fill: Whether to fill memory that is left with units that are kept on the device.

    Returns:
        The choice, and what it is expected to take.

    Raises:
        ValueError: If nothing fits; the message says how much is missing.
    """
    windows = list(_windows(len(workload.units), k, k_prime, machine))
    least = _least_bytes(workload, windows)
    if budget < least:
        has, more = readable_bytes(budget), readable_bytes(least - budget)
        raise ValueError(f"{has} of device memory is too little: it takes {more} more.")
    best = _choose_streaming(workload, machine, budget, windows, fill)
    sets = _sets_on_device(workload, budget - least) if fill else []
    tried: dict[int, _Candidate] = {}

    def seconds(count: int) -> float:
        if count not in tried:
            left = workload.with_on_device(sets[count])
            tried[count] = _choose_streaming(left, machine, budget, windows, fill)
        return tried[count].seconds

    count = _least_of(seconds, len(sets))
    if count is not None and _TIE * seconds(count) < best.seconds:
        best = tried[count]._replace(choice=replace(tried[count].choice, on_device=sets[count]))
    return best.choice, best.prediction


def _least_of(function: Callable[[int], float], length: int) -> int | None:
    """Return a local minimum of a function on 0 ... `length` - 1: the global one if it has a single valley."""
    step = -(-length // _SHARES)
    best = min(range(length - 1, -1, -max(1, step)), key=function, default=None)
    while best is not None and step > 1:
        step //= 2
        best = min([n for n in (best, best - step, best + step) if 0 <= n < length], key=function)
    return best


def _least_bytes(workload: Workload, windows: Iterable[tuple[int, int]]) -> int:
    """Return the least device memory with which a step can run."""
    weights = min(weight_bytes(workload, Choice(*window)) for window in windows)
    activations = activation_bytes(
        workload, choose_ways([unit.ways for unit in workload.units], 0, workload.turn_bytes)
    )
    return workload.reserve_bytes + gradient_bytes(workload) + weights + activations


def _sets_on_device(workload: Workload, room: int) -> list[tuple[int, ...]]:
    """Return the units that live on the device for each number of them, spread evenly, up to as many as fit."""
    able = [number for number, unit in enumerate(workload.units) if unit.bytes_on_device]
    sets = [tuple(able[at] for at in _spread(count, len(able))) for count in range(1, len(able) + 1)]
    return [units for units in sets if sum(workload.units[unit].bytes_on_device for unit in units) <= room]


def _choose_streaming(
    workload: Workload, machine: Machine, budget: int, windows: Sequence[tuple[int, int]], fill: bool
) -> _Candidate:
    """Return the best window for the units that stream."""
    room = budget - workload.reserve_bytes - gradient_bytes(workload)
    least_weights = min(weight_bytes(workload, Choice(*window)) for window in windows)
    candidates: list[_Candidate] = []
    fastest = math.inf
    for ways in _splits(workload, room - least_weights):
        left = room - activation_bytes(workload, ways)
        least = least_seconds(workload, machine, ways)
        if least > fastest:
            continue
        for window in sorted([*windows, *_largest_windows(workload, windows, left)]):
            choice = Choice(*window, ways=ways)
            arena = weight_bytes(workload, choice)
            if arena > left:
                continue
            for each in dict.fromkeys([choice, _filled(workload, choice, left)] if fill else [choice]):
                candidates.append(_Candidate(each, predict(workload, machine, each), arena))
                fastest = min(fastest, candidates[-1].seconds)
            if fastest <= _TIE * least:
                break  # larger windows cannot be faster than that
    tied = [candidate for candidate in candidates if candidate.seconds <= _TIE * fastest]
    return min(tied, key=_Candidate.rank)


def _windows(
    units: int, k: int | Literal["auto"], k_prime: int | Literal["auto"], machine: Machine
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of k and k_prime that are worth a try."""
    # Moving units together only helps if each copy has a constant cost.
    together: Sequence[int] = _K_PRIMES if machine.copy_seconds else _K_PRIMES[:1]
    if k_prime != "auto":
        together = (k_prime,)
    elif k != "auto":
        together = [number for number in together if number <= k]
    for number in together:
        if k != "auto":
            yield k, number
            continue
        window = number
        while window < units:
            yield window, number
            window += max(number, window // 6 // number * number if window >= _EVERY_K else 1)
        yield max(units, number), number


def _largest_windows(workload: Workload, windows: Sequence[tuple[int, int]], left: int) -> Iterator[tuple[int, int]]:
    """Yield the largest window that fits for each k_prime, if it lies between two of the given windows."""
    for number in {number for _, number in windows}:
        tried = sorted(k for k, other in windows if other == number)
        fits = [k for k in tried if weight_bytes(workload, Choice(k, number)) <= left]
        if fits and fits[-1] < tried[-1]:
            between = range(fits[-1], tried[len(fits)], number)
            largest = bisect_right(between, left, key=lambda k: weight_bytes(workload, Choice(k, number)))
            if largest > 1:
                yield between[largest - 1], number


def _spread(count: int, length: int) -> Iterator[int]:
    """Yield `count` of the numbers below `length`, spread evenly."""
    return ((2 * number + 1) * length // (2 * count) for number in range(count))


def _splits(workload: Workload, most: int) -> Iterator[tuple[Way, ...]]:
    """Yield ways for all units: the cheapest ones within several shares of the memory for activations.

    What a way really costs depends on how busy the lanes are with weights, which is not known here. So the cheapest
    ones are also searched for without offloading, and without recomputing.
    """
    if not workload.trains or all(len(unit.ways) == 1 for unit in workload.units):
        yield tuple(unit.ways[0] for unit in workload.units)
        return
    most -= workload.outside_bytes
    turn = workload.turn_bytes
    seen: set[tuple[Way, ...]] = set()
    for left_out in _LEFT_OUT:
        units = tuple(
            tuple(way for way in unit.ways if way.policy not in left_out) or unit.ways for unit in workload.units
        )
        least = _least_peak(units, turn)
        enough = min(most, peak([max(ways, key=lambda way: way.held) for ways in units], turn))
        for number in range(_SPLITS if enough > least else 1):
            ways = tuple(choose_ways(units, enough - (enough - least) * number // (_SPLITS - 1), turn))
            if ways not in seen:
                seen.add(ways)
                yield ways


@lru_cache(maxsize=8)  # the same for any number of units on the device
def _least_peak(units: tuple[tuple[Way, ...], ...], turn: int) -> int:
    return peak(choose_ways(units, 0, turn), turn)


def _filled(workload: Workload, choice: Choice, left: int) -> Choice:
    """Return the choice with as many units kept on the device as fit, spread evenly among those that stream."""
    streamed = [number for number, unit in enumerate(workload.units) if not unit.lives_on_device]
    length = len(streamed)

    def with_kept(count: int) -> Choice:
        kept = tuple(streamed[at] for at in _spread(count, length))
        return Choice(choice.k, choice.k_prime, kept, choice.ways)

    fits, too_many = 0, max(0, length - choice.k) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if weight_bytes(workload, with_kept(count)) <= left:
            fits = count
        else:
            too_many = count
    nothing_streamed = Choice(max(length, choice.k_prime), choice.k_prime, (), choice.ways)
    return nothing_streamed if weight_bytes(workload, nothing_streamed) <= left else with_kept(fits)
