"""Trains on two devices, or on one with the same micro-batches: what both make of the weights must be the same.

    python two_devices.py 1 weights.pt

Run by `test_second_device.py` in processes of its own; Lightning starts the second one by this very command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import tests  # noqa: F401  (has CUDA be the second device)
from sp_lightning import SuperpipelineStrategy

ROWS, BATCH = 32, 4


class Model(L.LightningModule):
    """Of transformer blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, foreach=False)


class InTurns(Sampler[int]):
    """One batch for the first device, one for the second; all of them where there is one device."""

    def __init__(self, rank: int, devices: int) -> None:
        self._batches = range(rank, ROWS // BATCH, devices)

    def __iter__(self) -> Iterator[int]:
        return (BATCH * batch + row for batch in self._batches for row in range(BATCH))

    def __len__(self) -> int:
        return BATCH * len(self._batches)


def train(devices: int, precision: str) -> dict[str, Tensor]:
    """Train; the weights."""
    rows = torch.randn(ROWS, 6, 16, generator=torch.Generator().manual_seed(1))
    strategy = "auto" if devices == 1 else SuperpipelineStrategy(k=2, process_group_backend="gloo")
    where = {"accelerator": "gpu", "devices": devices, "strategy": strategy, "use_distributed_sampler": False}
    how = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2 // devices, "max_epochs": 2, "barebones": True}
    trainer = L.Trainer(**where, **how, precision=precision)
    model = Model()
    trainer.fit(model, DataLoader(rows, BATCH, sampler=InTurns(trainer.global_rank, devices)))
    return {f"{precision} {name}": value.cpu() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    weights = train(int(sys.argv[1]), "32-true") | train(int(sys.argv[1]), "bf16-mixed")
    if rank_zero_only.rank == 0:
        torch.save(weights, sys.argv[2])
