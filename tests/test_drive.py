"""Optimizer state on a drive under the Trainer and Fabric: checkpoints, errors at the start, and RAM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from sp_lightning import SuperpipelineStrategy, optim
from sp_lightning.fabric import SuperpipelineStrategy as FabricStrategy

from .helpers import assert_same_trace, ram_is_full
from .lightning_modules import Base, assert_same_training, loader, note_end, streamed, trainer
from .planning.parts import Make
from .processes import run_python

OPTIMIZERS: dict[str, Make] = {
    "ours": partial(optim.AdamW, lr=1e-2, moments="int8"),
    "fused": partial(AdamW, lr=1e-2, fused=True),
}


@pytest.fixture(autouse=True)
def no_ram() -> Iterator[None]:
    with ram_is_full():
        yield


class Module(Base):
    optimizer = "ours"

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Fused(Module):
    optimizer = "fused"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_trainer_trains_as_ever(precision: str, clip: float | None) -> None:
    arguments = {"precision": precision, "gradient_clip_val": clip, "accumulate_grad_batches": 2}
    assert_same_training(Module, arguments=lambda: dict(arguments), nvme_path=".")


@pytest.mark.parametrize("make", [Module, Fused])
def test_a_trainer_resumes_with_and_without_a_drive(make: type[Module]) -> None:
    def run(path: str | None, **arguments: Any) -> tuple[L.Trainer, Module]:
        torch.manual_seed(0)
        module = make()
        ours = trainer(streamed(nvme_path=path), max_epochs=2, enable_checkpointing=False)
        ours.fit(module, loader(), **arguments)
        return ours, module

    ends = []
    for first, then in [(None, None), (".", None), (None, "."), (".", ".")]:
        torch.manual_seed(0)
        saving = trainer(streamed(nvme_path=first), max_epochs=1, enable_checkpointing=False)
        saving.fit(make(), loader())
        saving.save_checkpoint("half.ckpt")
        ours, module = run(then, ckpt_path="half.ckpt")
        end = note_end(module, ours)
        ends.append({label: value for label, value in end.items() if "loss" not in label and "random" not in label})
    for end in ends[1:]:
        assert_same_trace(ends[0], end)


def test_fabric_resumes_on_a_drive() -> None:
    ends = []
    for path in (None, "."):
        for half in (True, False):
            fabric = L.Fabric(accelerator="cpu", strategy=FabricStrategy(k=2, nvme_path=path))
            torch.manual_seed(0)
            plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
            model, optimizer = fabric.setup(plain, OPTIMIZERS["ours"](plain.parameters()))
            if not half:
                fabric.load("half.ckpt", {"model": model, "optimizer": optimizer})
            for step in range(3):
                fabric.backward(model(torch.full((2, 8), 1.0 + step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if half:
                fabric.save("half.ckpt", {"model": model, "optimizer": optimizer})
            else:
                ends.append((optimizer.state_dict()["state"], model.state_dict()))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.1)])
def test_other_optimizers_are_refused_before_the_first_step(make: Make) -> None:
    class Other(Base):
        def configure_optimizers(self) -> Optimizer:
            return make(self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("a step has begun")

    with pytest.raises(ValueError, match="`nvme_path='.'`: .* with these options makes more than one pass"):
        trainer(streamed(nvme_path=".")).fit(Other(), loader())


def test_state_takes_no_room_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drive, the same machine is too small, which is known before the first step."""
    room = sum(parameter.nbytes for parameter in Base().parameters())
    monkeypatch.setattr("sp_lightning.trainer.host_memory.available_host_memory", lambda: int(1.5 * room))
    with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException, match="of optimizer state"):
        trainer(SuperpipelineStrategy()).fit(Module(), loader())
    trainer(SuperpipelineStrategy(nvme_path="."), max_steps=1).fit(Module(), loader())


MEASURE = """
import torch
from pathlib import Path
from torch import nn
from sp_lightning import optim, superpipeline
from sp_lightning.pipeline.optimizer import state_file
def ram():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss")}
state_file.available_host_memory = lambda: 0
state_file._type_of_file_system = lambda device: ""
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(12)])
superpipeline(model, "cpu", nvme_path=NVME)
optimizer = optim.AdamW(model.parameters(), moments="int8")
for _ in range(3):
    model(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(*ram().values())
"""


def test_state_on_a_drive_takes_no_ram() -> None:
    """But for 64 MB of buffers: 206 MB of state are in neither private nor file pages."""
    Path("ram.py").write_text(MEASURE.replace("NVME", "None"))
    Path("drive.py").write_text(MEASURE.replace("NVME", "'.'"))
    anonymous, files, _ = map(int, run_python("ram.py")[0].split()[-3:])
    less, files_too, _ = map(int, run_python("drive.py")[0].split()[-3:])
    assert less < anonymous - 50, "MiB"
    assert files_too < files + 10
