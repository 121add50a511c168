"""What is measured, and what each way of having activations in backward is said to cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_lightning.pipeline import AcceleratorBackend
from sp_lightning.pipeline.activations.memory import HostPool, Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import AutoPolicy
from sp_lightning.pipeline.activations.recompute import SecondForwards
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.activations.ways import Footprint, Link
from sp_lightning.pipeline.lanes.backend import Backend, DeviceMemory
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.units import Member

from ..parts import RecordingBackend

FAST, SLOW = Link(1e12, 1e12), Link(1.0, 1.0)


def member(name: str) -> Member:
    weights = [SimpleNamespace(compute_bytes=10)]
    return SimpleNamespace(name=name, unit_name=name, unit=SimpleNamespace(weights=weights))  # type: ignore[return-value]


class Chooser(AutoPolicy):
    """Chooses between steps, as the pipeline has it choose."""

    def __init__(self, backend: Backend, room: int) -> None:
        super().__init__(second_forwards(backend))
        self.room = room

    def begin_step(self) -> None:
        if self.must_choose:
            self.choose(self.room)
        super().begin_step()


def policy(room: int, link: Link, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    monkeypatch.setattr(Link, "measured", staticmethod(lambda backend: link))
    return Chooser(RecordingBackend(), room)


def second_forwards(backend: Backend) -> SecondForwards:
    meter = Meter(backend, Stats())
    saved = SavedTensors(meter, Offloader(backend, HostPool(backend), meter, Stats()))
    return SecondForwards(saved, backend, Stats())


def ran_again(chooser: AutoPolicy, unit: Member, seconds: float) -> None:
    chooser._second_forwards.times.append((unit.name, 0.0, seconds))


def measure(chooser: AutoPolicy, steps: int = 2, size: int = 8, seconds: float = 1.0, **changes: Any) -> dict[str, str]:
    """Some steps of three units; the policies of the step after them."""
    units = [member(name) for name in "abc"]
    call = Footprint(held=10, saved=100, large=100, working=110, repeatable=True)._replace(**changes)
    for _ in range(steps):
        chooser.begin_step()
        for unit in units:
            if chooser.policy(unit, size, []) == "recompute":
                chooser.note(unit, size, call)
                ran_again(chooser, unit, seconds)
        chooser.end_backward()
    chooser.begin_step()
    return {unit.name: chooser.policy(unit, size, []) for unit in units}


def test_two_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(measure(policy(10**6, FAST, monkeypatch), steps=1).values()) == {"recompute"}
    assert set(measure(policy(10**6, FAST, monkeypatch), steps=2).values()) == {"keep"}


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading over a fast link, recomputing over a slow one, as much as is needed."""
    assert list(measure(policy(220, SLOW, monkeypatch)).values()) == ["recompute", "recompute", "keep"]
    assert sorted(measure(policy(290, SLOW, monkeypatch)).values()) == ["keep", "keep", "recompute"]
    assert sorted(measure(policy(490, FAST, monkeypatch)).values()) == ["keep", "keep", "keep"]
    chosen = measure(policy(290, FAST, monkeypatch))
    assert set(chosen.values()) == {"keep", "offload"}


def test_activations_of_units_that_cannot_run_again_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = policy(290, SLOW, monkeypatch)
    with pytest.warns(UserWarning, match="activations take"):
        assert set(measure(chooser, repeatable=False, large=0).values()) == {"keep"}


def test_a_larger_call_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice the inputs twice as much is saved, and there is not enough room any more."""
    chooser = policy(330, SLOW, monkeypatch)
    assert set(measure(chooser).values()) == {"keep"}
    chosen = measure(chooser, steps=1, size=16, held=20, saved=200, large=200, working=220)
    assert list(chosen.values()) == ["recompute", "recompute", "keep"]
    assert measure(chooser, steps=1, size=8) == chosen  # as the largest batch needs


def test_memory_outside_of_units_at_the_turn_is_seen_where_units_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss's is there when all inputs are held and no unit is at work: what units work with must not hide it."""
    chooser = policy(390, SLOW, monkeypatch)
    units = [member(name) for name in "abc"]
    for _ in range(2):
        chooser.begin_step()
        chooser._meter.begin_step()
        for number, unit in enumerate(units):
            chooser.policy(unit, 8, [])
            chooser.note(unit, 8, Footprint(10, 100, 0, 110, True))
            chooser._meter._peak = 10 * number + 110
            chooser._meter._stats.activation_bytes = 10 * number + 10
            chooser.end_call()
        chooser._meter._peak = 30 + 90  # inputs of three units, and the loss
        chooser.reach()
        chooser._meter._peak = 20 + 110  # in backward, when the loss's is free again
        for unit in units:
            ran_again(chooser, unit, 1.0)
        chooser.end_backward()
    chooser.begin_step()
    assert (chooser.turn_bytes, chooser.outside_bytes) == (90, 0)
    chosen = [chooser.policy(unit, 8, []) for unit in units]
    assert sorted(chosen) == ["keep", "keep", "recompute"]  # 10 + 110 + 110 and 90


def test_activations_of_several_backward_passes_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a GAN: what a unit has saved is free before its next forward, but calls in one graph add up."""
    chooser = policy(10**6, SLOW, monkeypatch)
    unit = member("a")
    for _ in range(2):
        chooser.begin_step()
        for calls in (1, 3, 2):
            for _ in range(calls):
                chooser.policy(unit, 8, [])
                chooser.note(unit, 8, Footprint(10, 100, 0, 110, True))
                chooser.end_call()
            chooser.reach()
            ran_again(chooser, unit, 1.0)
            chooser.end_backward()
    chooser.begin_step()
    (way, *_) = chooser.ways()["a"]
    assert (way.held, way.working) == (330, 110)
    assert chooser.policy(unit, 8, []) == "keep"


class TellsMemory(RecordingBackend):
    """As a device that says how much of its memory is allocated."""

    allocated = most = 0

    def allocate_more(self, nbytes: int) -> None:
        """Or less."""
        self.allocated += nbytes
        self.most = max(self.most, self.allocated)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 40, 1 << 40, self.allocated, self.most, self.most, 0)

    def count_peak_anew(self) -> DeviceMemory:
        before, self.most = self.memory(), self.allocated
        return before


def test_memory_for_operations_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax over logits is in no graph; without room for it the first step that keeps activations fails.

    It is there when units are not at work, so what they work with must not hide it, and it is not added to that.
    """
    monkeypatch.setattr(Link, "measured", staticmethod(lambda backend: SLOW))
    backend, units = TellsMemory(), [member(name) for name in "abc"]
    chooser = Chooser(backend, 600)
    meter = chooser._meter

    def take(nbytes: int) -> None:
        backend.allocate_more(nbytes)
        backend.allocate_more(-nbytes)

    def hold(nbytes: int) -> None:
        backend.allocate_more(nbytes)
        meter._stats.activation_bytes += nbytes
        meter._peak = max(meter._peak, meter.bytes)

    for number in range(2):
        chooser.begin_step()
        meter.begin_step()
        backend.allocate_more(1000 * (number == 0))  # weights, and what the first step makes for good
        for unit in units:
            chooser.policy(unit, 8, [])
            chooser.note(unit, 8, Footprint(10, 100, 0, 110, True))
            hold(110)
            take(7)
            hold(-100)
            chooser.end_call()
        take(250)  # the loss
        for unit in reversed(units):
            chooser.reach()
            ran_again(chooser, unit, 1.0)
            hold(100)
            take(30 if unit.name == "b" else 9)
            hold(-110)
        chooser.end_backward()
        take(5000)  # between steps, by a validation
    chooser.begin_step()
    assert (chooser.turn_bytes, chooser.outside_bytes) == (250, 0)
    assert [of[0].working for of in chooser.ways().values()] == [140] * 3, (
        "as much for each as for the one that takes most"
    )
    assert sorted(chooser.policy(unit, 8, []) for unit in units) == ["keep"] * 3  # 330 and 250

    chooser.choose(479)
    chooser.begin_step()
    assert [chooser.policy(unit, 8, []) for unit in units].count("keep") == 1  # 130 and 250: two are 480


def test_costs() -> None:
    """Copies that computing hides cost a little, what sticks out costs all of its time."""
    unit = Footprint(30, 70, 100, 100, True)
    ways = {way.policy: way for way in unit.ways(Link(up=100.0, down=100.0), 10, 3.0, 6.0)}
    assert (ways["keep"].seconds, ways["keep"].held) == (0, 100)
    assert (ways["recompute"].seconds, ways["recompute"].repeating, ways["recompute"].held) == (3.0, 3.0, 30)
    assert ways["offload"].seconds == pytest.approx(0.2)  # a tenth of one second down, of one second up
    ways = {way.policy: way for way in unit.ways(Link(up=10.0, down=20.0), 10, 3.0, 6.0)}
    assert ways["offload"].seconds == pytest.approx((5 - 3) + (11 - 6) + 0.1 * 15)
    both = ways["recompute_offload"]
    assert (both.held, both.leaving, both.under_way, both.repeating) == (0, 30, 30, 3.0)
    assert both.seconds == pytest.approx(3.0 + 0.1 * (30 / 10 + 30 / 20)), "the second forward hides copies as well"
    assert [way.policy for way in unit.ways(None, 10, 3.0, 6.0)] == ["keep", "recompute"]
    unit = unit._replace(repeatable=False)
    assert [way.policy for way in unit.ways(Link(10.0, 20.0), 10, 3.0, 6.0)] == ["keep", "offload"]


def test_what_cannot_run_again_follows_its_unit_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = policy(10**6, FAST, monkeypatch)
    measure(chooser, repeatable=False)
    for prescribed, followed in [("recompute", "keep"), ("recompute_offload", "offload"), ("offload", "offload")]:
        chooser.prescribe(dict.fromkeys("abc", prescribed))
        assert {chooser.policy(member(name), 8, []) for name in "abc"} == {followed}


@pytest.mark.parametrize(
    ("fraction", "total", "free"), [(None, 1000, 130), (1.0, 1000, 130), (0.05, 50, 30), (0.01, 10, 0)]
)
def test_free_memory_of_a_device(fraction: float | None, total: int, free: int) -> None:
    """What the device has, and what torch's allocator holds and does not use; no more than the process may take."""
    api = SimpleNamespace(
        mem_get_info=lambda device: (100, 1000),
        memory_reserved=lambda device: 50,
        memory_allocated=lambda device: 20,
        max_memory_allocated=lambda device: 20,
        memory_stats=lambda device: {},
    )
    if fraction is not None:
        api.get_per_process_memory_fraction = lambda device: fraction
    backend = object.__new__(AcceleratorBackend)
    backend._api, backend.device, backend._former_peak = api, torch.device("cuda", 0), 0
    assert backend.memory()[:2] == (total, free)
