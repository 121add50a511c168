"""What the callback measures on a device: torch's own count of memory, and times by the device's events."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.callback import PREFIX

from ..lightning_modules import Notes, trainer

pytestmark = pytest.mark.gpu


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
    """What torch has counted before each time that the engine has it count anew."""
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
