"""The cost in closed form, against the engine itself on virtual clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_lightning.pipeline import Lane
from sp_lightning.planning.clock import predict
from sp_lightning.planning.work import Choice, Machine, UnitWork, Way, Workload

from .. import simulated
from ..simulated import UNIT_BYTES
from .parts import Blocks, Fixed

MACHINES = {name: Blocks(**vars(machine)) for name, machine in simulated.MACHINES.items()}
WINDOWS = [
    (1, ()), (2, ()), (4, ()), (16, ()), (2, (4, 11)), (3, (0, 5, 10, 15)),
    (2, (1, 3, 5, 7, 9, 11, 13, 15)), (2, (0, 1, 2, 3, 4, 5)),
]  # fmt: skip
BLOCKS = MACHINES["sending is the slowest"]


def compare(blocks: Blocks, window: tuple[int, tuple[int, ...]], workload: Workload, **training: Any) -> None:
    """Time within 10 %, memory of what streams within 2 %."""
    k, living = window
    real = blocks.train(Fixed((k, living)), steps=4, **training)
    predicted = predict(workload, blocks.machine, Choice(k, living))
    assert predicted.seconds == pytest.approx(real.seconds[-1], rel=0.1)
    assert predicted.device_bytes == pytest.approx(real.summary.device_bytes + real.summary.gradient_bytes, rel=0.02)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_in_backward(name: str, window: Any) -> None:
    compare(MACHINES[name], window, MACHINES[name].workload())


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_under_the_next_forward(name: str, window: Any) -> None:
    compare(MACHINES[name], window, MACHINES[name].workload(stepping="under forward"), in_backward=False)


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_gradients_that_add_up(name: str, window: Any) -> None:
    """Between steps of the optimizer weights do not change; adding a gradient moves two thirds of a step's bytes."""
    blocks = MACHINES[name]
    workload = blocks.workload(micro_steps=3, add_seconds=blocks.units * blocks.step * 2 / 3)
    compare(blocks, window, workload, accumulate=3)


@pytest.mark.parametrize("waiting", [range(16), range(8), range(4)], ids=["all", "half", "a quarter"])
@pytest.mark.parametrize("training", [{"clip": True}, {"accumulate": 4}, {"clip": True, "accumulate": 4}], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_gradients_wait(name: str, training: dict[str, Any], waiting: range) -> None:
    """On the device, until the host updates their units: within 5 % of the time that it takes."""
    blocks, micro_steps = MACHINES[name], training.get("accumulate", 1)
    waits = "after backward" if training.get("clip") else "in backward"
    adding = blocks.units * blocks.step * 2 / 3 * (micro_steps > 1)
    workload = blocks.workload(stepping=waits, micro_steps=micro_steps, add_seconds=adding, may_wait=True)
    workload = replace(workload, units=tuple(replace(unit, sum_bytes=UNIT_BYTES) for unit in workload.units))
    real = blocks.train(Fixed((2, (), (), waiting)), steps=4, in_backward=waits == "in backward", **training)
    predicted = predict(workload, blocks.machine, Choice(2, waiting=tuple(waiting)))
    assert real.stats.late_gradients == 4 * len(waiting)
    assert predicted.seconds == pytest.approx(real.seconds[-1], rel=0.05)


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
def test_frozen_units(window: Any) -> None:
    """Only activations have gradients, weights do not change: nothing is sent twice that is still there."""
    unit = UnitWork("", UNIT_BYTES, 0, 0, BLOCKS.forward, BLOCKS.backward, bytes_on_device=UNIT_BYTES)
    compare(BLOCKS, window, Workload((unit,) * BLOCKS.units, stepping=None), frozen=True, in_backward=False)


def test_loads_are_those_of_the_law() -> None:
    """2N - k for each step of the optimizer, 2 (N - k) without one; what lives on the device is not sent."""
    for k, living, loads in [(4, (), 28), (16, (), 16), (2, (4, 11), 26)]:
        predicted = predict(BLOCKS.workload(), BLOCKS.machine, Choice(k, living))
        assert predicted.bytes_to_device == loads * UNIT_BYTES
        assert predicted.bytes_to_host == (16 - len(living)) * UNIT_BYTES
    assert predicted.bottleneck is Lane.TO_DEVICE
    for k, loads in [(4, 28 + 2 * 24), (16, 16)]:
        accumulated = predict(BLOCKS.workload(micro_steps=3), BLOCKS.machine, Choice(k))
        assert accumulated.bytes_to_device == loads * UNIT_BYTES


def test_inference_sends_every_unit_once_for_each_forward() -> None:
    workload = Workload(tuple(UnitWork("", 100, forward_seconds=1.0) for _ in range(10)), trains=False, stepping=None)
    for k, living, loads in [(2, (), 10), (5, (), 10), (8, (), 4), (2, (1, 4, 7), 7), (10, (), 0)]:
        assert predict(workload, Machine(100.0, 100.0, 1.0), Choice(k, living)).bytes_to_device == loads * 100


def test_recomputing_takes_compute_time_and_offloading_takes_copies() -> None:
    keep, recompute = Way("keep", 400, 400), Way("recompute", 100, 400, repeating=1.0)
    offload = Way("offload", 0, 400, leaving=400, under_way=400)
    workload = Workload((UnitWork("", 64, 0, 0, 1.0, 2.0),) * 8, stepping=None, outside_bytes=7)
    machine = Machine(100.0, 100.0, 1.0)
    took = {
        way.policy: predict(workload, machine, Choice(8, ways=(way,) * 7 + (keep,)))
        for way in (keep, recompute, offload)
    }
    assert {policy: each.seconds for policy, each in took.items()} == pytest.approx(
        {"keep": 24.0, "recompute": 31.0, "offload": 29.0 + 30.0}, rel=0.06
    )
    held = {policy: each.device_bytes - 8 * 64 - 7 for policy, each in took.items()}
    assert held == {"keep": 8 * 400, "recompute": 7 * 100 + 400, "offload": 800}
    assert [took["offload"].lanes[lane] for lane in (Lane.TO_HOST, Lane.TO_DEVICE)] == [28.0, 28.0], (
        "the last one stays"
    )
    assert took["offload"].host_bytes == 7 * 400


def test_visits_that_begin_after_backward_do_not_hold_the_forward_back() -> None:
    """Units that live there compute meanwhile. It was held until all had visited, so that clipped it was faster."""
    unit = UnitWork("", 10, 10, 100, 1.0, 0.1, bytes_on_device=50, visit_up=100, visit_down=100, bytes_after_step=10)
    choice = Choice(2, living=(0, 1), visiting=(2, 3))
    plain = predict(Workload((unit,) * 4), Machine(100.0, 100.0, 1e6), choice)
    clipped = predict(Workload((unit,) * 4, stepping="after backward"), Machine(100.0, 100.0, 1e6), choice)
    assert plain.seconds <= 1.001 * clipped.seconds


def test_what_the_devices_memory_moves_takes_computing_time() -> None:
    """Updates of units that live there and norms by themselves; what is beside computing, the half that it waits."""
    unit = UnitWork("", 0, 100, 1, 1.0, 1.0, bytes_on_device=1, update_traffic=400, visit_up=100, visit_traffic=500)
    fast = Machine(1e9, 1e9, 1e9)
    slow = replace(fast, device_memory=100.0)

    def slower(workload: Workload, choice: Choice) -> float:
        return predict(workload, slow, choice).seconds - predict(workload, fast, choice).seconds

    living, visiting = Choice(4, living=(0, 1, 2, 3)), Choice(4, visiting=(0, 1, 2, 3), defers_visits=True)
    assert slower(Workload((unit,) * 4), living) == pytest.approx(4 * 4.0)
    assert slower(Workload((unit,) * 4, stepping="after backward"), living) == pytest.approx(4 * (4.0 + 1.0))
    assert predict(Workload((unit,) * 4), slow, visiting).lanes[Lane.COMPUTE] == pytest.approx(8.0 + 4 * 6.0 / 2)
    waiting = Workload((replace(unit, sum_bytes=200),) * 4, stepping="after backward", micro_steps=2)
    assert slower(waiting, Choice(4, waiting=(0,))) > slower(waiting, Choice(4)) + 5.0
