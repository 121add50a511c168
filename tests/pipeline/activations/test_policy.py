"""What is measured of units' calls, and which policy they follow."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sp_lightning.pipeline.activations.memory import Footprint, Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import AutoPolicy
from sp_lightning.pipeline.activations.recompute import SecondForwards
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.device_memory import DeviceMemory
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Member

from ..parts import RecordingBackend


def member(name: str) -> Member:
    return SimpleNamespace(name=name, unit_name=name)  # type: ignore[return-value]


def auto_policy(backend: Backend | None = None) -> AutoPolicy:
    backend = backend or RecordingBackend()
    meter = Meter(backend, Stats())
    saved = SavedTensors(meter, Offloader(backend, meter, Stats()))
    return AutoPolicy(SecondForwards(saved, backend, Stats()), {})


def end(auto: AutoPolicy, is_turn: bool = False) -> None:
    auto.end_stretch(auto._meter.end_stretch(), is_turn)


CALL = Footprint(held=10, saved=100, large=100, working=110, repeatable=True)


def measure(auto: AutoPolicy, steps: int = 2, rows: int = 2, call: Footprint = CALL) -> list[str]:
    """Some steps of three units; the policies of the last one."""
    units = [member(name) for name in "abc"]
    for _ in range(steps):
        auto.begin_step()
        for unit in units:
            if auto.policy(unit, [torch.empty(rows)]) == "recompute":
                auto.note(unit, call)
        auto.end_backward()
    return [auto.in_use[unit.name] for unit in units]


def test_the_second_step_is_measured_and_what_was_measured_follows_its_policy() -> None:
    auto = auto_policy()
    assert measure(auto, 1) == ["recompute"] * 3
    assert not auto.footprints()
    assert measure(auto, 1) == ["recompute"] * 3
    assert auto.footprints() == dict.fromkeys("abc", CALL)
    auto.policies = {"a": "keep", "b": "offload"}
    assert measure(auto, 1) == ["keep", "offload", "recompute"]
    assert auto.footprints() == dict.fromkeys("abc", CALL)


def test_memory_outside_of_units_at_the_turn_is_seen_where_units_recompute() -> None:
    """A loss's is there when all inputs are held and no unit is at work: what units work with must not hide it."""
    auto, units = auto_policy(), [member(name) for name in "abc"]
    for _ in range(2):
        auto.begin_step()
        auto._meter.begin_step()
        for number, unit in enumerate(units):
            auto.policy(unit, [])
            auto.note(unit, Footprint(10, 100, 0, 110, True))
            auto._meter._peak = 10 * number + 110
            auto._meter._stats.activation_bytes = 10 * number + 10
            end(auto)
        auto._meter._peak = 30 + 90  # inputs of three units, and the loss
        end(auto, is_turn=True)
        auto._meter._peak = 20 + 110  # in backward, when the loss's is free again
        end(auto)
        auto.end_backward()
    assert (auto.turn_bytes, auto.outside_bytes) == (90, 0)


def test_activations_of_several_backward_passes_do_not_add_up() -> None:
    """A step of a GAN: what a unit has saved is free before its next forward, but calls in one graph add up."""
    auto, unit = auto_policy(), member("a")
    for _ in range(2):
        auto.begin_step()
        for calls in (1, 3, 2):
            for _ in range(calls):
                auto.policy(unit, [])
                auto.note(unit, Footprint(10, 100, 0, 110, True))
                end(auto)
            end(auto, is_turn=True)
            auto.end_backward()
    assert auto.footprints() == {"a": Footprint(30, 300, 0, 110, True)}


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


def test_memory_for_operations_is_left_free() -> None:
    """A softmax over logits is in no graph; without room for it the first step that keeps activations fails.

    It is there when units are not at work, so what they work with must not hide it, and it is not added to that.
    """
    backend, units = TellsMemory(), [member(name) for name in "abc"]
    auto = auto_policy(backend)
    meter = auto._meter

    def take(nbytes: int) -> None:
        backend.allocate_more(nbytes)
        backend.allocate_more(-nbytes)

    def hold(nbytes: int) -> None:
        backend.allocate_more(nbytes)
        meter._stats.activation_bytes += nbytes
        meter._peak = max(meter._peak, meter._stats.activation_bytes)

    for number in range(2):
        auto.begin_step()
        meter.begin_step()
        backend.allocate_more(1000 * (number == 0))  # weights, and what the first step makes for good
        for unit in units:
            auto.policy(unit, [])
            auto.note(unit, Footprint(10, 100, 0, 110, True))
            hold(110)
            take(7)
            hold(-100)
            end(auto)
        take(250)  # the loss
        for unit in reversed(units):
            end(auto, is_turn=unit is units[-1])
            hold(100)
            take(30 if unit.name == "b" else 9)
            hold(-110)
        end(auto)
        auto.end_backward()
        take(5000)  # between steps, by a validation
    assert (auto.turn_bytes, auto.outside_bytes) == (250, 0)
    working = [footprint.working for footprint in auto.footprints().values()]
    assert working == [140] * 3, "as much for each as for the one that takes most"
