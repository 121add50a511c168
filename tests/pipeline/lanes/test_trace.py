"""What is written down of a step: on virtual clocks, where every time is known, and on every kind of backend."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from torch.optim import SGD

from sp_lightning.pipeline import Kind, Pipeline, PipelineOptions, Recording

from ...helpers import attached
from ...simulated import SimulatedBackend, TimedBlock
from ...zoo.blocks import Chain, chain, rows

UNITS, WIDTH = 6, 8
UNIT_BYTES = 4 * WIDTH * WIDTH


class Scene:
    """Six units on virtual clocks: 3 s forward, 6 s backward, 2 s to be sent, 1 s for a gradient, 4 s to be stepped."""

    def __init__(self, **options: Any) -> None:
        self.backend = SimulatedBackend(UNIT_BYTES / 2, UNIT_BYTES, 3 * UNIT_BYTES / 4)
        self.model = Chain(TimedBlock(WIDTH, self.backend, 3.0, 6.0) for _ in range(UNITS))
        options = {"k": 2, "units": TimedBlock, **options}
        self.pipeline = Pipeline(self.model, "cpu", options=PipelineOptions(**options), backend=self.backend)
        self.optimizer = SGD(self.model.parameters(), 0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()

    def recorded(self) -> Recording:
        self.step()
        self.step()
        with self.pipeline.record() as recording:
            self.step()
        return recording


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.pipeline.detach()


def of(recording: Recording, kind: Kind) -> list[Any]:
    return [span for span in recording.spans if span.kind is kind]


def test_every_piece_of_work_is_there_with_its_time_and_bytes(scene: Scene) -> None:
    recording = scene.recorded()
    stalls = of(recording, Kind.STALL)

    def working(span: Any) -> float:
        inside = [stall for stall in stalls if span.begin <= stall.begin and stall.end <= span.end]
        return float(span.end - span.begin - sum(stall.end - stall.begin for stall in inside))

    assert [working(span) for span in of(recording, Kind.FORWARD)] == pytest.approx([3.0] * UNITS)
    assert [working(span) for span in of(recording, Kind.BACKWARD)] == pytest.approx([6.0] * UNITS)
    expected = {
        Kind.LOAD: [(2.0, UNIT_BYTES)] * (2 * UNITS - 2),
        Kind.GRADIENTS: [(1.0, UNIT_BYTES)] * UNITS,
        Kind.STEP: [(4.0, 3 * UNIT_BYTES)] * UNITS,
    }
    for kind, numbers in expected.items():
        assert [(round(span.end - span.begin, 6), span.nbytes) for span in of(recording, kind)] == numbers
    assert {span.kind for span in recording.spans} == {Kind.FORWARD, Kind.BACKWARD, Kind.STALL, *expected}


def test_accumulation_is_work_on_the_host_and_torchs_profiles_have_a_range_for_each_phase() -> None:
    """Those of the host's thread are in profiles of all threads alone."""
    model, every_thread = chain(2), torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    optimizer, profile = SGD(model.parameters(), 0.1), torch.profiler.profile(experimental_config=every_thread)
    with attached(model, k=1, activations="offload") as pipeline, pipeline.record() as recording:
        model(*rows(1 << 12)).sum().backward()
        with profile:
            model(*rows(1 << 12)).sum().backward()
            optimizer.step()
            pipeline.backend.drain()
    assert len(of(recording, Kind.ADD)) == 2
    assert len(recording.steps) == 2
    ranges = [e for e in sorted(profile.events(), key=lambda e: e.time_range.start) if "superpipeline: " in e.name]
    phases = [(e.thread, e.name.removeprefix("superpipeline: ").replace(" of blocks.", " ")) for e in ranges]
    device = (
        "forward 0, load 1, offload 0, forward 1, backward 1, fetch 0, gradients 1, load 0, backward 0, gradients 0"
    )
    # each of the tensors that leave, and come back, has a range
    assert [name for name, _ in groupby(name for thread, name in phases if thread == 1)] == device.split(", ")
    assert sorted(name for thread, name in phases if thread != 1) == ["add 0", "add 1", "step 0", "step 1"]
