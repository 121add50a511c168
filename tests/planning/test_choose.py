"""The choice against all choices there are: within the budget, and nearly as fast as the fastest of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import gains, random_case

from sp_lightning.planning.assumptions import Assumptions
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.clock import predict
from sp_lightning.planning.known import named_model, rates_of_gpu
from sp_lightning.planning.memory import first_choice, first_host_bytes
from sp_lightning.planning.report import plan_row
from sp_lightning.planning.work import Choice, Machine, UnitWork, Way, Workload

MIB = 1 << 20
WAYS = (Way("keep", 60, 60), Way("recompute", 10, 60, repeating=0.5), Way("offload", 0, 60, leaving=60, under_way=60))
FAST = Machine(10_000.0, 10_000.0, 10_000.0)


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


@settings(max_examples=30, deadline=None)
@given(workloads(), machines, st.integers(300, 2000))
def test_the_chosen_window_is_nearly_the_fastest_of_all(workload: Workload, machine: Machine, budget: int) -> None:
    """Of 1 to 4 places, and as many as there are units."""
    units = len(workload.units)
    every = [predict(workload, machine, Choice(k)) for k in {*range(1, min(5, units)), units}]
    fitting = [prediction.seconds for prediction in every if prediction.device_bytes <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="are available"):
            choose(workload, machine, budget)
        return
    chosen = choose(workload, machine, budget)
    assert chosen == predict(workload, machine, chosen.choice)
    assert chosen.device_bytes <= budget
    assert chosen.seconds <= 1.05 * min(fitting)


@pytest.mark.parametrize("budget", [700, 900, 1200, 1600, 2500])
@pytest.mark.parametrize("rate", [30.0, 100.0, 1000.0])
def test_activations_and_weights_share_the_budget(budget: int, rate: float) -> None:
    """Against every number of units that are kept, the others recomputed or offloaded, with every window."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, ways=WAYS)
    workload = Workload((*(unit,) * 7, replace(unit, ways=WAYS[:1])), outside_bytes=50)
    machine = Machine(rate, rate, 1000.0)
    chosen = choose(workload, machine, budget)
    assert chosen.device_bytes <= budget
    every = [
        predict(workload, machine, Choice(k, ways=(*[way] * (8 - kept), *[WAYS[0]] * kept)))
        for k in (1, 2, 3, 4, 8)
        for kept in range(1, 9)
        for way in WAYS[1:]
    ]
    assert chosen.seconds <= 1.05 * min(each.seconds for each in every if each.device_bytes <= budget)


UNIT = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, bytes_on_device=400)


@pytest.mark.parametrize("budget", [800, 1500, 2300, 4000, 6000])
@pytest.mark.parametrize("machine", [Machine(100, 100, 40), Machine(20, 100, 1000), Machine(500, 500, 30)])
def test_units_live_on_the_device_where_that_is_faster(budget: int, machine: Machine) -> None:
    """Against every number of them, spread or the first ones, with every window."""
    workload = Workload((UNIT,) * 10)
    chosen = choose(workload, machine, budget)
    assert chosen.device_bytes <= budget
    every = [
        predict(workload, machine, Choice(k, living))
        for count in range(11)
        for living in [tuple((2 * n + 1) * 10 // (2 * count) for n in range(count)), tuple(range(count))]
        for k in (1, 2, 3, 4, 10)
    ]
    assert chosen.seconds <= 1.05 * min(each.seconds for each in every if each.device_bytes <= budget)


def test_no_choice_by_hand_is_faster() -> None:
    """A fixed `k` leaves living and visiting on, and is never predicted more than 2 % faster than what is chosen."""
    unit = replace(UNIT, ways=WAYS, visit_up=120, visit_down=120, step_bytes=260)
    workload = Workload((*(unit,) * 11, replace(unit, ways=WAYS[:1])))
    for budget, host in [(1500, 60.0), (2500, 60.0), (4000, 30.0), (4000, 200.0)]:
        machine = Machine(100.0, 100.0, host, both=170.0, host_memory=2 * host + 100)
        for stepping in ("in backward", "after backward"):
            work = replace(workload, stepping=stepping)
            chosen = choose(work, machine, budget)
            by_hand = [choose(work, machine, budget, k=k) for k in (1, 2, 3, 4)]
            assert chosen.seconds <= 1.02 * min(each.seconds for each in by_hand)
            assert all(each.choice.living or each.choice.visiting for each in by_hand)


@pytest.mark.parametrize("seed", [8, 13, 62, 145, 266])
def test_of_random_models_no_choice_by_hand_is_faster(seed: int) -> None:
    """Some of the cases of tools/random_plans.py; in the last one what is near the best draft is worse.

    Two were faster clipped: units visited with the weights that they brought for the next forward.
    """
    found = dict(gains(*random_case(seed)))
    assert max(found.values()) <= 0.02


def test_nothing_visits_where_the_host_uses_all_of_its_memory() -> None:
    unit = replace(UNIT, visit_up=12, visit_down=12, step_bytes=260)
    for memory, visits in [(200.0, True), (129.0, False)]:
        machine = Machine(100.0, 100.0, 100.0, host_memory=memory)
        chosen = choose(Workload((unit,) * 10, stepping="after backward"), machine, 1200)
        assert bool(chosen.choice.visiting) == visits


def test_clipping_is_never_faster() -> None:
    """Adapters on a frozen base: a visit brings 9 of 657 MB, so all else is sent as ever (19 blocks of Flux)."""
    unit = UnitWork("", 657, 9, 60, 0.02, 0.03, bytes_after_step=9, visit_up=28, visit_down=37, visit_bytes=30)
    workload = Workload((replace(unit, bytes_on_device=720),) * 19)
    for budget in (3000, 6000, 9000):
        for host in (60e3, 5e3):
            machine = Machine(25e3, 25e3, host, both=42e3, host_memory=1.5 * host + 40e3)
            plain = choose(workload, machine, budget)
            clipped = choose(replace(workload, stepping="after backward"), machine, budget)
            assert plain.seconds <= 1.001 * clipped.seconds
            streamed = 19 - len(clipped.choice.living)
            assert clipped.bytes_to_device >= 657 * (2 * (streamed - clipped.choice.k))


def test_by_size_no_time_matters_and_nothing_visits() -> None:
    unit = replace(UNIT, ways=WAYS, visit_up=12, visit_down=12)
    workload = Workload((*(unit,) * 9, replace(unit, ways=WAYS[:1])))
    slow = tuple(replace(each, forward_seconds=9.0, backward_seconds=0.1) for each in workload.units)
    first = choose(workload, Machine(100, 100, 40), 3000, by_size=True).choice
    second = choose(replace(workload, units=slow), Machine(20, 500, 1000, both=20), 3000, by_size=True).choice
    assert first == second
    assert first.living
    assert not first.visiting


def test_nothing_is_offloaded_that_the_host_has_no_room_for() -> None:
    """Where activations would wait there, they are recomputed; what the first steps hold has to fit, too."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, ways=WAYS, bytes_on_device=400, host_bytes=300)
    workload = Workload((*(unit,) * 9, replace(unit, ways=WAYS[:1])))
    free = choose(workload, FAST, 900)
    assert any(way.leaving for way in free.choice.ways)
    least = first_host_bytes(workload, first_choice(workload))
    assert least == 10 * 300 + 3 * 100  # of three gradients on their way
    for room in range(least, free.host_bytes + 60, 60):
        chosen = choose(workload, FAST, 900, host_budget=room)
        assert chosen.host_bytes <= room
        assert free.seconds <= chosen.seconds <= free.seconds + 9 * WAYS[1].repeating + 0.1
    assert chosen.seconds == pytest.approx(free.seconds, rel=0.01)
    with pytest.raises(TooLittleMemory, match="of CPU memory, but only 1.3 KiB are available. .* the opti"):
        choose(workload, FAST, 900, host_budget=least - 2000)
    waits = replace(workload, units=(*(replace(unit, ways=WAYS[::2]),) * 9, workload.units[-1]))
    assert choose(waits, FAST, 600).host_bytes > least
    with pytest.raises(TooLittleMemory, match="of GPU memory, but only 600 B are"):
        choose(waits, FAST, 600, host_budget=least)
    clipped = replace(workload, stepping="after backward")
    with pytest.raises(TooLittleMemory, match="of CPU memory, .* Most of it is for weights and the optimizer's state"):
        choose(clipped, FAST, 900, host_budget=least)


def test_what_takes_most_is_named() -> None:
    unit = UnitWork("a.block", 100, 100, 100, ways=(Way("keep", 300, 400),))
    for work, named in [
        (Workload((unit,) * 2), "what one unit computes"),
        (Workload((replace(unit, weight_bytes=999),) * 2), "one unit, 'a.block'"),
        (Workload((unit,) * 2, turn_bytes=2000), "logits and the loss: `sp_lightning.loss_in_slices"),
    ]:
        with pytest.raises(TooLittleMemory, match=f"Most of it is for {named}"):
            choose(work, FAST, 100)


def test_too_small_a_budget_raises_with_the_least_that_is_needed() -> None:
    """One slot, two staging buffers, and what the least greedy of all ways takes."""
    unit = UnitWork("", 100, 100, 100, 1.0, 2.0, bytes_after_step=100, ways=WAYS)
    workload = Workload((unit, unit, replace(unit, ways=WAYS[:1])), outside_bytes=12)
    with pytest.raises(ValueError, match="A step needs 392 B of GPU memory, but only 299 B are available"):
        choose(workload, FAST, 299)
    assert choose(workload, FAST, 392).device_bytes == 392


def test_a_model_of_eighty_blocks_is_planned_in_seconds() -> None:
    """A 70B shape on 48 GiB, with all that can be chosen."""
    saved = (Way("keep", 1500 * MIB, 1000 * MIB), Way("recompute", 128 * MIB, 1000 * MIB, repeating=0.1))
    sizes: dict[str, Any] = {"bytes_after_step": 1700 * MIB, "bytes_on_device": 14 << 30}
    state = {"visit_up": 10 << 30, "visit_down": 12 << 30, "visit_bytes": 100 * MIB}
    block = UnitWork("", 1700 * MIB, 1700 * MIB, 855_000_000 * 28, 0.12, 0.24, saved, **sizes, **state)
    ends = UnitWork("", 2000 * MIB, 2000 * MIB, 10**9 * 28, 0.01, 0.02, bytes_after_step=2000 * MIB)
    begin = time.process_time()
    chosen = choose(Workload((ends, *[block] * 80, ends)), Machine(25e9, 25e9, 60e9, 40e9), 48 << 30)
    assert time.process_time() - begin < 5
    assert chosen.device_bytes <= 48 << 30


def test_more_units_stay_where_fewer_gradients_wait_then() -> None:
    """With two more units on the device, its memory is enough again, as the host has room for more gradients."""
    batch: dict[str, Any] = {"tokens": 2048, "accumulate": 4, "gradient_clip_val": 1.0}
    small: dict[str, Any] = {"host_memory": "64GiB", "precision": "bf16-true", "moments": "int8"}
    row = plan_row(named_model("Qwen2.5-VL-7B-Instruct"), Assumptions(**rates_of_gpu("RTX 4090"), **small, **batch))
    assert row.step is not None
    assert row.step.choice.waiting
    assert len(row.step.choice.living) == 4
    assert row.step.seconds < 7.2
