"""The choice against all choices there are: within the budget, and nearly as fast as the fastest of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.planning import Choice, Machine, UnitWork, Workload, choose, predict
from sp_lightning.planning.cost import device_bytes

MIB = 1 << 20
WAYS = (
    Way("keep", 60, 60, 0.0),
    Way("recompute", 10, 60, 0.5, repeating=0.5),
    Way("offload", 0, 60, 0.1, leaving=60, under_way=60),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A few units, now and then a large one at either end."""
    seconds = st.floats(0.1, 3.0)
    unit = UnitWork("", 100, 100, 100, draw(seconds), draw(seconds))
    units = [unit] * draw(st.integers(1, 9))
    for end in (0, len(units)):
        if draw(st.booleans()):
            units.insert(end, replace(unit, weight_bytes=draw(st.integers(100, 400)), gradient_bytes=100))
    return Workload(tuple(units))


machines = st.builds(Machine, st.floats(20, 2000), st.floats(20, 2000), st.floats(20, 2000))


@settings(max_examples=60, deadline=None)
@given(workloads(), machines, st.integers(300, 2000))
def test_the_chosen_window_is_nearly_the_fastest_of_all(workload: Workload, machine: Machine, budget: int) -> None:
    units = len(workload.units)
    choices = [Choice(k, k_prime) for k in range(1, units + 1) for k_prime in range(1, k + 1)]
    fitting = [choice for choice in choices if device_bytes(workload, choice) <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="too little"):
            choose(workload, machine, budget)
        return
    choice, prediction = choose(workload, machine, budget)
    assert prediction == predict(workload, machine, choice)
    assert prediction.device_bytes == device_bytes(workload, choice) <= budget
    assert prediction.seconds <= 1.05 * min(predict(workload, machine, other).seconds for other in fitting)


@pytest.mark.parametrize("budget", [700, 900, 1200, 1600, 2500])
@pytest.mark.parametrize("rate", [30.0, 100.0, 1000.0])
def test_activations_and_weights_share_the_budget(budget: int, rate: float) -> None:
    """Against every number of units that are kept, recomputed or offloaded, with every window."""
    workload = Workload((UnitWork("", 100, 100, 100, 1.0, 2.0, ways=WAYS),) * 8, reserve_bytes=50)
    machine = Machine(rate, rate, 1000.0)
    _, prediction = choose(workload, machine, budget)
    assert prediction.device_bytes + 50 <= budget
    fastest = min(
        predict(workload, machine, choice).seconds
        for k in range(1, 9)
        for kept in range(9)
        for again in range(9 - kept)
        for ways in [(*[WAYS[2]] * (8 - kept - again), *[WAYS[1]] * again, *[WAYS[0]] * kept)]
        if device_bytes(workload, choice := Choice(k, ways=ways)) + 50 <= budget
    )
    assert prediction.seconds <= 1.05 * fastest


def blocks(count: int = 12, **facts: Any) -> Workload:
    return Workload((UnitWork("", 100, 100, 100, 1.0, 2.0),) * count, **facts)


FAST = Machine(10_000.0, 10_000.0, 10_000.0)


def test_given_k_and_k_prime_are_obeyed() -> None:
    for k, k_prime in [(3, 1), (6, 3), (4, 4)]:
        chosen, _ = choose(blocks(), FAST, 10_000, k=k, k_prime=k_prime, fill=False)
        assert (chosen.k, chosen.k_prime, chosen.kept) == (k, k_prime, ())
    assert choose(blocks(), FAST, 10_000, k_prime=3)[0].k_prime == 3
    assert choose(blocks(), FAST, 10_000, k=5, fill=False)[0].k == 5


def test_units_travel_together_where_a_copy_costs_more_than_its_bytes() -> None:
    slow_start = Machine(100.0, 1000.0, 10_000.0, copy_seconds=2.0)
    assert choose(blocks(), slow_start, 800, fill=False)[0].k_prime > 1
    assert choose(blocks(), replace(slow_start, copy_seconds=0.0), 800, fill=False)[0].k_prime == 1


def test_spare_memory_is_filled_evenly() -> None:
    """Two slots, two staging buffers, and four units that stay: one in three."""
    chosen, _ = choose(blocks(), FAST, 800)
    assert (chosen.k, chosen.kept) == (2, (1, 4, 7, 10))


def test_a_model_that_fits_stays_on_the_device() -> None:
    chosen, _ = choose(blocks(), FAST, 12 * 100 + 200)
    assert (chosen.k, chosen.kept) == (12, ())


def test_a_model_that_nearly_fits_is_streamed() -> None:
    """A window of pairs leaves a hole here and there; it is not taken for room."""
    for k_prime in (1, 2, 3):
        for budget in range(500, 1500, 50):
            assert choose(blocks(8), FAST, budget, k_prime=k_prime)[1].device_bytes <= budget


def test_reserved_memory_stays_free() -> None:
    assert choose(blocks(reserve_bytes=200), FAST, 800)[0].kept == (3, 9)


def test_too_small_a_budget_raises_with_the_least_that_is_needed() -> None:
    """One slot, two staging buffers, and what the least greedy of all ways takes."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, ways=WAYS)
    workload = Workload((unit,) * 3, outside_bytes=5, reserve_bytes=7)
    with pytest.raises(ValueError, match="299 B of device memory is too little: it takes 93 B more"):
        choose(workload, FAST, 299)
    assert choose(workload, FAST, 392)[1].device_bytes == 385


def test_a_model_of_eighty_blocks_is_planned_in_seconds() -> None:
    """A 70B shape on 24 GiB, with all that can be chosen."""
    saved = (Way("keep", 1500 * MIB, 1000 * MIB, 0.0), Way("recompute", 128 * MIB, 1000 * MIB, 0.1, repeating=0.1))
    block = UnitWork("", 1700 * MIB, 1700 * MIB, 855_000_000, 0.12, 0.24, ways=saved)
    ends = UnitWork("", 2000 * MIB, 2000 * MIB, 10**9, 0.01, 0.02)
    workload = Workload((ends, *[block] * 80, ends))
    begin = time.process_time()
    _, prediction = choose(workload, Machine(25e9, 25e9, 1.5e9, 2e-5), 48 << 30)
    assert time.process_time() - begin < 5
    assert prediction.device_bytes <= 48 << 30
