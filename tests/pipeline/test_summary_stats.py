"""What a pipeline tells of itself, and counts."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
import torch
from torch import nn
from torch.optim import Adam

from sp_lightning import superpipeline
from sp_lightning.pipeline import Pipeline, PipelineOptions, Stats
from sp_lightning.pipeline.activations.offload import Meter
from sp_lightning.pipeline.lanes.backend import DeviceMemory
from sp_lightning.pipeline.stats import readable_bytes

from ..planning.parts import Fixed
from ..zoo.blocks import Block, chain
from .parts import host_backend


def test_readable_bytes() -> None:
    counts = [0, 1023, 1024, 1536, 5 * 2**30, 5000 * 2**40]
    assert [*map(readable_bytes, counts)] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "5000.0 TiB"]


def test_clearing_counters() -> None:
    """Every counter, also one that is added later; what is held now is still held."""
    stats = Stats(*range(1, len(fields(Stats)) + 1))
    held = stats.activation_bytes
    stats.clear()
    left = {name: value for name, value in asdict(stats).items() if value}
    assert left == {"activation_bytes": held, "activation_peak_bytes": held}


def test_an_activation_in_the_place_of_a_replaced_buffer_counts() -> None:
    """Memory is known by its identity, which no other tensor may get when a buffer is gone."""
    with host_backend() as backend:
        meter = Meter(backend, Stats())
        buffer = torch.ones(4)
        meter.leave_out([buffer])
        assert meter.hold(buffer[1:]) is None
        del buffer
        activations = [torch.ones(4) for _ in range(1000)]
        assert all(meter.hold(activation) is not None for activation in activations)


def test_the_summary_of_a_model() -> None:
    """Numbers that can be worked out by hand: blocks of 5 weights, sizes rounded up to 256 bytes each."""
    model = chain(6, 16, 32)
    model.head = nn.Linear(16, 16)
    pipeline = superpipeline(model, "cpu", k=3, units=Block)
    summary = pipeline.summary()
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    slot = sum(-(-parameter.nbytes // 256) * 256 for parameter in model.blocks[0].parameters())
    head = 16 * 16 * 4 + 16 * 4
    assert vars(summary) == {
        "device": "cpu",
        "units": 6,
        "k": 3,
        "model_bytes": 6 * block + head,
        "device_bytes": 3 * slot + 1024 + 256,
        "gradient_bytes": 0,
        "resident": ("head.weight", "head.bias"),
        "host_bytes": 6 * slot + 1024 + 256,
        "host_gradient_bytes": 0,
        "optimizer_bytes": 0,
        "on_drive": (0, 0),
        "parameters": (6 * block + head) // 4,
        "unit_names": tuple(f"blocks.{index}" for index in range(6)),
        "living": (),
        "visiting": (),
        "lowered": 0,
        "pinned": False,
        "plan": None,
    }
    pipeline.detach()


def test_the_summary_where_units_are_stepped_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of visits are device memory, their state lies beside masters, and what lives there leaves the host."""
    model = chain(6, 16, 32)
    planner = Fixed((2,), (2, (4,), (0, 1)))
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(units=Block), planner=planner)
    optimizer = Adam(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline._engine.settle()
    summary, block = pipeline.summary(), sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    slot = sum(-(-parameter.nbytes // 256) * 256 for parameter in model.blocks[0].parameters())
    assert (summary.living, summary.visiting) == (("blocks.4",), ("blocks.0", "blocks.1"))
    pieces = pipeline._engine.visits.nbytes()
    living = summary.device_bytes - 2 * slot - pieces
    assert living >= 3 * block, "weight and state"
    assert pieces > 3 * block, "two pieces: weight, state, gradient"
    assert summary.host_bytes == 5 * slot
    assert 2 * 2 * block < summary.optimizer_bytes < 5 * 2 * block + 1024
    assert dict(summary.rows())["optimizer updates"].startswith("1 stay on the GPU, 2 are updated there, the others")
    memory = DeviceMemory(total=4000, free=1000, allocated=3000, peak=3000, peak_so_far=3000, retries=0)
    monkeypatch.setattr(pipeline.backend, "memory", lambda: memory)
    assert pipeline.budget == summary.device_bytes + summary.gradient_bytes + 900, "what streams counts"
    pipeline.detach()


@pytest.mark.parametrize(("k", "phrase"), [(2, "2 at a time on the CPU, as"), (6, "all stay on the CPU, as")])
def test_the_table(k: int, phrase: str) -> None:
    """One aligned row for each thing that a user asks about."""
    pipeline = superpipeline(chain(6, 16, 32), "cpu", k=k, units=Block)
    rows = str(pipeline.summary()).splitlines()
    pipeline.detach()
    assert len({row.index("  ") < 30 for row in rows}) == 1
    assert any(row.startswith("units") and f"6: {phrase}" in row for row in rows)
    assert "nan" not in str(rows)
