"""`sp-lightning check`, `plan --measure`, the bench and the callback on a device."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from suite import rooflines
from torch import nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.callback import PREFIX
from sp_lightning.check import check
from sp_lightning.check_program.program import check_program
from sp_lightning.planning import rates

from ..lightning_modules import Notes, trainer

pytestmark = pytest.mark.gpu


def test_it_passes(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not bit-equal is named: the optimizer's rounding."""
    assert check(cuda)
    lines = capsys.readouterr().out.splitlines()
    assert all("same bits" in line or "AdamW's rounding" in line for line in lines if line.startswith("  "))
    assert sum("56 GPU updates" in line for line in lines) == 2


def test_a_program_passes(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a user, which logs times: up to the first update all bits are the same, and later all but rounding."""
    program = "tests.test_check_program"
    assert check_program([f"--model={program}.Net", f"--data={program}.Data", "--model.times=metric"], cuda, steps=3)
    lines = capsys.readouterr().out.splitlines()
    ways = [line for line in lines if line.startswith("  ")]
    assert len(ways) == 18
    assert all("same bits" in line or "the optimizer's rounding" in line for line in ways)
    assert "right in 18 ways" in lines[-1]


def test_copies_of_the_bench_are_ordered_after_the_memory_they_fill(cuda: torch.device) -> None:
    """The second device ends a process whose streams race."""
    assert min(rooflines._copies_of_gpu(1 << 20).values()) > 0


def test_all_rates_of_a_device(monkeypatch):
    """With little work."""
    for name, value in {"_STEPPED": 2**16, "_BLOCK": 2**23}.items():
        monkeypatch.setattr(rates, name, value)
    before = torch.cuda.memory_allocated()
    found = rates.measure()
    # a host's memory that copies and steps do not slow down has no rate of its own
    assert {"host_bandwidth", "link"} <= found.keys() <= {"host_bandwidth", "link", "memory_bandwidth"}
    assert min(found.values()) >= 0, "of so little"
    assert torch.cuda.memory_allocated() == before


# --------------------------------------- the callback: torch's own count of memory, and times by the device's events


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(8)])

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def fit(module, accelerator, logger, callback):
    strategy = SuperpipelineStrategy(k=2, optimizer_on="host")  # or all would live there
    how = {"accelerator": accelerator, "devices": 1, "max_epochs": 1, "log_every_n_steps": 4}
    trainer(strategy, **how, logger=logger, callbacks=[callback]).fit(
        module, DataLoader(torch.randn(12 * 64, 256), batch_size=64)
    )


@pytest.fixture
def peaks(device, monkeypatch):
    """What torch has counted before each time that the engine sets its counters to zero."""
    api, counted = torch.get_device_module(device), []
    reset = api.reset_peak_memory_stats

    def note_and_reset(*args):
        counted.append(api.max_memory_allocated())
        reset(*args)

    monkeypatch.setattr(api, "reset_peak_memory_stats", note_and_reset)
    return counted


def test_metrics_and_timeline_of_a_device(accelerator, device, peaks, tmp_path):
    notes = Notes()
    fit(Net(), accelerator, notes, SuperpipelineCallback(tmp_path / "timeline.json"))
    (timed,) = [values for _, values in notes.ours() if PREFIX + "step_seconds" in values]
    most = max([*peaks, torch.get_device_module(device).max_memory_allocated()])
    assert 0 < timed[PREFIX + "device_peak_bytes"] <= most
    assert 0 < timed[PREFIX + "step_seconds"] < 10
    assert 0 < timed[PREFIX + "compute_share"] <= 1
    assert timed[PREFIX + "to_device_gb_per_s"] > 0
    events = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"forward", "backward", "load", "gradients"} <= {event["cat"] for event in events if event["ph"] == "X"}
