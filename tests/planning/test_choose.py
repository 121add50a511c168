"""The choice against all choices there are: within the budget, and nearly as fast as the fastest of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sp_lightning.planning import Choice, Machine, UnitWork, Workload, choose, predict
from sp_lightning.planning.cost import Way

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
    unit = UnitWork("", 100, 100, 100, draw(seconds), draw(seconds), bytes_after_step=100)
    units = [unit] * draw(st.integers(1, 9))
    for end in (0, len(units)):
        if draw(st.booleans()):
            size = draw(st.integers(100, 400))
            units.insert(end, replace(unit, weight_bytes=size, bytes_after_step=size))
    return Workload(tuple(units))


machines = st.builds(Machine, st.floats(20, 2000), st.floats(20, 2000), st.floats(20, 2000))


@settings(max_examples=60, deadline=None)
@given(workloads(), machines, st.integers(300, 2000))
@example(
    Workload((UnitWork("", 100, 100, 100, 1.0, 1.0, bytes_after_step=100),) * 6), Machine(20, 22, 20), 800
)  # where k=5 is best
def test_the_chosen_window_is_nearly_the_fastest_of_all(workload: Workload, machine: Machine, budget: int) -> None:
    units = len(workload.units)
    every = [predict(workload, machine, Choice(k, k_prime)) for k in range(1, units + 1) for k_prime in range(1, k + 1)]
    fitting = [prediction.seconds for prediction in every if prediction.device_bytes <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="too little"):
            choose(workload, machine, budget)
        return
    chosen = choose(workload, machine, budget)
    assert chosen == predict(workload, machine, chosen.choice)
    assert chosen.device_bytes <= budget
    assert chosen.seconds <= 1.05 * min(fitting)


@pytest.mark.parametrize("budget", [700, 900, 1200, 1600, 2500])
@pytest.mark.parametrize("rate", [30.0, 100.0, 1000.0])
def test_activations_and_weights_share_the_budget(budget: int, rate: float) -> None:
    """Against every number of units that are kept, recomputed or offloaded, with every window."""
    workload = Workload((UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, ways=WAYS),) * 8, reserve_bytes=50)
    machine = Machine(rate, rate, 1000.0)
    chosen = choose(workload, machine, budget)
    assert chosen.device_bytes + 50 <= budget
    every = [
        predict(workload, machine, Choice(k, ways=ways))
        for k in range(1, 9)
        for kept in range(9)
        for again in range(9 - kept)
        for ways in [(*[WAYS[2]] * (8 - kept - again), *[WAYS[1]] * again, *[WAYS[0]] * kept)]
    ]
    assert chosen.seconds <= 1.05 * min(each.seconds for each in every if each.device_bytes + 50 <= budget)


@pytest.mark.parametrize("budget", [800, 1500, 2300, 4000, 6000])
@pytest.mark.parametrize("machine", [Machine(100, 100, 40), Machine(20, 100, 1000), Machine(500, 500, 30)])
def test_units_live_on_the_device_where_that_is_faster(budget: int, machine: Machine) -> None:
    """Against every number of them, with every window."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, bytes_on_device=400)
    workload = Workload((unit,) * 10)
    chosen = choose(workload, machine, budget)
    assert chosen.device_bytes <= budget
    every = [
        predict(workload, machine, Choice(k, k_prime, kept=kept, on_device=there))
        for count in range(11)
        for there in [tuple((2 * n + 1) * 10 // (2 * count) for n in range(count))]
        for k in range(1, 11)
        for k_prime in (1, 2)
        if k >= k_prime
        for kept in [(), tuple(n for n in range(10) if n not in there)[::2]]
    ]
    assert chosen.seconds <= 1.05 * min(each.seconds for each in every if each.device_bytes <= budget)
    streamed = choose(replace(workload, units=(replace(unit, bytes_on_device=0),) * 10), machine, budget)
    assert not chosen.choice.on_device or chosen.seconds < streamed.seconds


def blocks(count: int = 12, **facts: Any) -> Workload:
    return Workload((UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100),) * count, **facts)


FAST = Machine(10_000.0, 10_000.0, 10_000.0)


def test_units_travel_together_where_a_copy_costs_more_than_its_bytes() -> None:
    slow_start = Machine(100.0, 1000.0, 10_000.0, copy_seconds=2.0)
    assert choose(blocks(), slow_start, 800, fill=False).choice.k_prime > 1
    assert choose(blocks(), replace(slow_start, copy_seconds=0.0), 800, fill=False).choice.k_prime == 1


def test_too_small_a_budget_raises_with_the_least_that_is_needed() -> None:
    """One slot, two staging buffers, and what the least greedy of all ways takes."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, ways=WAYS)
    workload = Workload((unit,) * 3, outside_bytes=5, reserve_bytes=7)
    with pytest.raises(ValueError, match="299 B of device memory is too little: it takes 93 B more"):
        choose(workload, FAST, 299)
    assert choose(workload, FAST, 392).device_bytes == 385


def test_a_model_of_eighty_blocks_is_planned_in_seconds() -> None:
    """A 70B shape on 48 GiB, with all that can be chosen."""
    saved = (Way("keep", 1500 * MIB, 1000 * MIB, 0.0), Way("recompute", 128 * MIB, 1000 * MIB, 0.1, repeating=0.1))
    block = UnitWork("", 1700 * MIB, 1700 * MIB, 855_000_000 * 28, 0.12, 0.24, saved, 13 << 30)
    block = replace(block, bytes_after_step=1700 * MIB)
    ends = UnitWork("", 2000 * MIB, 2000 * MIB, 10**9 * 28, 0.01, 0.02, bytes_after_step=2000 * MIB)
    begin = time.process_time()
    chosen = choose(Workload((ends, *[block] * 80, ends)), Machine(25e9, 25e9, 60e9, 2e-5), 48 << 30)
    assert time.process_time() - begin < 5
    assert chosen.device_bytes <= 48 << 30
