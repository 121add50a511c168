"""The bench's systems: rivals that run here give plain training's numbers, and others say why they do not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from suite.module import Batches, BenchModule
from suite.networks import Network
from suite.runner import Processes
from suite.sets import WORKLOADS
from suite.systems.base import System
from suite.systems.device import Device
from suite.systems.paper import Paper
from suite.worker import Job, measure, run
from suite.workloads import Window, Workload
from torch import Tensor, nn

BLOCKS = 5
STEPS = 3


class Block(nn.Module):
    """What is hard to move: a weight of its own, a layer that others use, a weight that forward changes, buffers."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.shared = shared
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.seen = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += inputs.mean(0)
        return inputs + self.scale * self.shared(torch.tanh(self.linear(self.norm(inputs))))


class Chain(Network):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        shared = nn.Linear(8, 8)
        self.body = nn.ModuleList(Block(shared) for _ in range(BLOCKS))
        self.head = nn.Linear(8, 1)

    def blocks(self) -> list[nn.Module]:
        return list(self.body)

    def forward(self, **batch: Tensor) -> Tensor:
        hidden = self.stem(batch["inputs"])
        for block in self.body:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


CHAIN = Workload(
    name="chain",
    kind="train",
    network=Chain,
    batch=lambda samples, generator: {"inputs": torch.randn(samples, 4, generator=generator)},
    samples=6,
    items="images",
    items_per_sample=1,
    precision="32-true",
    learning_rate=1e-2,
    clipping=0.1,
)


def train(system: System) -> dict[str, Tensor]:
    """Train a chain, and return all that is in it."""
    torch.manual_seed(0)
    module = system.prepare(BenchModule(Chain(), CHAIN, system), CHAIN, torch.device("cpu"))
    arguments = {"gradient_clip_val": CHAIN.clipping, **system.trainer_arguments(CHAIN)}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, barebones=True, **arguments)
    trainer.fit(module, Batches(CHAIN, STEPS, pinned=False).loader())
    return module.network.state_dict()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def job(workload: str, system: str, budget: int | None = None) -> Job:
    return Job(workload, system, None, WORKLOADS[workload].samples, round=0, warm_up=1, steps=2, budget=budget)


def in_a_process(job: Job, folder: Path) -> dict[str, Any]:
    """Run a job as the bench does: what it leaves in its process is gone with it."""
    written, why = Processes(folder, on_gpu=False).run(run, job, 240)
    return written or {"error": why}


class TestPaper:
    @pytest.mark.parametrize("window", [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3), (BLOCKS, 1)], ids=str)
    def test_weights_are_those_of_plain_training(self, window: Window):
        assert_same(train(Paper(window)), train(Device()))

    @pytest.mark.parametrize(("k", "loads"), [(1, 9), (2, 8), (4, 6)])
    def test_every_step_loads_what_the_window_lacks(self, k: int, loads: int):
        system = Paper((k, 1))
        train(system)
        assert system.facts() == {"k": k, "k_prime": 1, "units": BLOCKS, "loads": STEPS * loads}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch needs a GPU")
@pytest.mark.parametrize(("workload", "budget"), [("toy-lm-bf16", None), ("toy-lm", 500_000)])
def test_fsdp2_reaches_the_losses_of_plain_training(tmp_path, workload, budget):
    fsdp2 = in_a_process(job(workload, "fsdp2", budget), tmp_path)
    assert fsdp2["error"] is None
    assert fsdp2["values"] == pytest.approx(measure(job(workload, "device"))["values"], abs=1e-5)
