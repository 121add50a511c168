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
