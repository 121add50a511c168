"""The cost model against the engine itself on virtual clocks: the same order of things, so the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline import Lane
from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.weights import host, sections
from sp_lightning.planning import Choice, Machine, UnitWork, Workload, predict
from sp_lightning.planning.cost import least_seconds, ways_of

from .. import simulated
from ..simulated import UNIT_BYTES, WIDTH, TimedBlock
from .parts import Blocks, Fixed

MACHINES = {name: Blocks(**vars(machine)) for name, machine in simulated.MACHINES.items()}
WINDOWS = [
    (1, 1, ()),
    (2, 1, ()),
    (5, 1, ()),
    (4, 2, ()),
    (16, 1, ()),
    (2, 1, (4, 11)),
    (3, 1, (0, 5, 10, 15)),
    (4, 2, (3, 8)),
]


def compare(
    blocks: Blocks, window: tuple[int, int, tuple[int, ...]], workload: Workload, rel: float = 0.01, **training: Any
) -> None:
    k, k_prime, kept = window
    real = blocks.train(Fixed(window), steps=4, **training)
    predicted = predict(workload, blocks.machine, Choice(k, k_prime, kept))
    assert predicted.seconds == pytest.approx(real.seconds[-1], rel=rel)
    assert predicted.device_bytes == real.summary.device_bytes + real.summary.gradient_bytes


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_in_backward(name: str, window: Any) -> None:
    blocks = MACHINES[name]
    compare(blocks, window, blocks.workload(staging_bytes=2 * UNIT_BYTES))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_in_sections(name: str, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when the first and the last are done is predicted, as if they were of equal size."""
    monkeypatch.setattr(sections, "SECTION", WIDTH * WIDTH // 4)
    workload = MACHINES[name].workload(staging_bytes=2 * UNIT_BYTES)
    units = tuple(replace(unit, sections=4) for unit in workload.units)
    compare(MACHINES[name], window, replace(workload, units=units), rel=0.04)


@pytest.mark.parametrize("window", WINDOWS[1::2], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_under_the_next_forward(name: str, window: Any) -> None:
    blocks = MACHINES[name]
    workload = blocks.workload(staging_bytes=2 * UNIT_BYTES, stepping="under forward")
    compare(blocks, window, workload, in_backward=False)


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_units_are_stepped_when_all_gradients_are_there(name: str, window: Any) -> None:
    blocks = MACHINES[name]
    workload = blocks.workload(stepping="under forward", clips=True)
    units = tuple(replace(unit, gradient_bytes=2 * UNIT_BYTES) for unit in workload.units)  # norms travel with them
    workload = replace(workload, units=units)
    compare(blocks, window, workload, in_backward=False, clip=True)


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_an_optimizer_step_without_overlap(name: str, window: Any) -> None:
    blocks = MACHINES[name]
    workload = blocks.workload(staging_bytes=2 * UNIT_BYTES, stepping="apart")
    compare(blocks, window, workload, in_backward=False, overlap_optimizer=False)


@pytest.mark.parametrize("window", WINDOWS[1::3], ids=str)
def test_frozen_units(window: Any) -> None:
    """Only activations have gradients, weights do not change: nothing is sent twice that is still there."""
    blocks = MACHINES["sending is the slowest"]
    units = tuple(UnitWork("", UNIT_BYTES, 0, 0, blocks.forward, blocks.backward) for _ in range(blocks.units))
    compare(blocks, window, Workload(units, stepping=None), frozen=True, in_backward=False)


class AdaptedBlock(TimedBlock):
    """A unit of twice the bytes, half of which are frozen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.base = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.base.sum())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", MACHINES)
def test_only_what_was_stepped_is_sent_to_where_the_rest_still_lies(
    name: str, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_GAP", 0)  # such small units are not worth another copy
    blocks = MACHINES[name]
    workload = blocks.workload(staging_bytes=2 * UNIT_BYTES)
    units = tuple(replace(unit, weight_bytes=2 * UNIT_BYTES, stepped_bytes=UNIT_BYTES) for unit in workload.units)
    compare(blocks, window, replace(workload, units=units), rel=0.02, block=AdaptedBlock)  # some copies overtake others


def test_gradients_that_add_up() -> None:
    """Between steps of the optimizer weights do not change; adding gradients on the host is not counted."""
    blocks = Blocks(forward=0.4, backward=0.8, up=1.0, down=0.5, step=0.01)
    compare(blocks, (3, 1, ()), blocks.workload(staging_bytes=2 * UNIT_BYTES, micro_steps=3), accumulate=3)


def test_predicted_lanes_add_up_to_all_bytes_and_work() -> None:
    blocks = MACHINES["sending is the slowest"]
    predicted = predict(blocks.workload(), blocks.machine, Choice(4))
    loads = 2 * blocks.units - 4
    assert predicted.lanes == pytest.approx(
        {Lane.COMPUTE: 16 * 1.2, Lane.TO_DEVICE: loads * 1.0, Lane.TO_HOST: 16 * 0.9, Lane.HOST: 16 * 0.5}
    )
    assert predicted.bytes_to_device == loads * UNIT_BYTES
    assert predicted.bytes_to_host == 16 * UNIT_BYTES
    assert predicted.bottleneck is Lane.TO_DEVICE


def test_no_choice_is_faster_than_the_busiest_lane() -> None:
    for blocks in MACHINES.values():
        for k in range(1, 17):
            workload, choice = blocks.workload(), Choice(k)
            least = least_seconds(workload, blocks.machine, ways_of(workload, choice))
            assert predict(workload, blocks.machine, choice).seconds >= least


def test_recomputing_from_the_host_takes_compute_time_and_copies_of_inputs() -> None:
    keep, both = Way("keep", 400, 400, 0.0), Way("recompute_offload", 0, 400, 1.1, 100, 100, repeating=1.0)
    workload = Workload((UnitWork("", 64, 0, 0, 1.0, 2.0, ways=(keep, both)),) * 8, stepping=None)
    machine = Machine(100.0, 100.0, 1.0)
    predicted = predict(workload, machine, Choice(8, ways=(both,) * 8))
    assert predicted.seconds == pytest.approx(8 * 4.0), "inputs come and go while the device computes"
    assert predicted.device_bytes == 8 * 64 + 100 + 400
    assert [predicted.lanes[lane] for lane in (Lane.TO_HOST, Lane.TO_DEVICE)] == pytest.approx([6.0, 6.0])
    assert predicted.host_bytes == 8 * 100
    assert least_seconds(workload, machine, (both,) * 8) == pytest.approx(8 * 4.0)


def test_recomputing_takes_compute_time_and_offloading_takes_copies() -> None:
    keep, recompute = Way("keep", 400, 400, 0.0), Way("recompute", 100, 400, 1.0, repeating=1.0)
    offload = Way("offload", 0, 400, 0.0, leaving=400, under_way=400)
    unit = UnitWork("", 64, 0, 0, 1.0, 2.0, ways=(keep, recompute, offload))
    workload = Workload((unit,) * 8, stepping=None, outside_bytes=7)
    machine = Machine(100.0, 100.0, 1.0)
    kept, again, away = (predict(workload, machine, Choice(8, ways=(way,) * 8)) for way in unit.ways)
    assert (kept.seconds, again.seconds) == pytest.approx((24.0, 32.0))
    weights = 8 * 64
    assert kept.device_bytes == weights + 8 * 400 + 7
    assert again.device_bytes == weights + 7 * 100 + 400 + 7
    assert away.device_bytes == weights + 400 + 400 + 7
    assert [away.lanes[lane] for lane in (Lane.TO_HOST, Lane.TO_DEVICE)] == pytest.approx([24.0, 24.0])  # two stay
    assert away.host_bytes == 8 * 400
    assert away.seconds == pytest.approx(2 * 4.0 * 6 + 2 * 3.0, rel=0.1)


def test_copies_that_cost_the_same_whatever_their_size() -> None:
    blocks = Blocks(forward=0.1, backward=0.2, up=0.5, down=0.1, step=0.0001)
    machine = Machine(UNIT_BYTES / 0.5, UNIT_BYTES / 0.1, WIDTH * WIDTH * 1e4, copy_seconds=0.5)
    one_by_one, two_by_two = (predict(blocks.workload(), machine, Choice(4, k_prime)) for k_prime in (1, 2))
    assert one_by_one.lanes[Lane.TO_DEVICE] == pytest.approx(28 * (0.5 + 0.5))
    assert two_by_two.lanes[Lane.TO_DEVICE] == pytest.approx(14 * (1.0 + 0.5))
    assert two_by_two.seconds < one_by_one.seconds


def test_inference_sends_every_unit_once_for_each_forward() -> None:
    units = tuple(UnitWork("", 100, forward_seconds=1.0) for _ in range(10))
    workload = Workload(units, trains=False, stepping=None)
    machine = Machine(100.0, 100.0, 1.0)
    for k, kept, loads in [(2, (), 10), (5, (), 10), (2, (1, 4, 7), 7), (10, (), 0)]:
        assert predict(workload, machine, Choice(k, 1, kept)).bytes_to_device == loads * 100


def test_computing_waits_for_resident_weights_that_are_still_being_stepped() -> None:
    """They are sent first in the next step, as every unit may need them."""
    resident = UnitWork("resident", 100, 100, 100)
    workload = Workload((UnitWork("", 100, forward_seconds=1.0, backward_seconds=2.0),), resident)
    machine = Machine(to_device=100.0, to_host=100.0, optimizer=10.0)
    # after backward: their gradients leave, they are stepped, and they come back
    assert predict(workload, machine, Choice(1)).seconds == pytest.approx(1 + 2 + 1 + 10 + 1)
