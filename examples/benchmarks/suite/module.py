"""The LightningModule that all systems run, its data, and the clock that measures them."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from suite.networks import Network
from suite.systems.base import System
from suite.workloads import Workload


class BenchModule(L.LightningModule):
    """The module that a user would write around the network; the system makes the optimizer.

    Args:
        network: The model, on the host.
        workload: The workload to run.
        system: The system that runs it.
    """

    def __init__(self, network: Network, workload: Workload, system: System) -> None:
        super().__init__()
        self.network = network
        self.workload = workload
        self.system = system

    @override
    def configure_model(self) -> None:
        self.system.configure_model(self, self.workload)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(**batch)

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(**batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return self.system.make_optimizer(trainable, self.workload)


class Batches(Dataset[dict[str, Tensor]]):
    """Two alternating batches, in pinned memory if there is a GPU, because making data is not to be measured.

    Args:
        workload: The workload that makes the batches.
        steps: Number of batches in total.
        pinned: Whether they are in pinned memory.
    """

    def __init__(self, workload: Workload, steps: int, pinned: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        pool = [workload.batch(workload.samples, generator) for _ in range(2)]
        if pinned:
            pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
        self._pool = pool
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._pool[index % len(self._pool)]

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        """Return a loader for a Trainer that yields each batch as it is."""
        return DataLoader(self, batch_size=None)


class Clock(L.Callback):
    """Records when each step began, and the value it computed.

    A step lasts from its beginning to the beginning of the next, so work that a system leaves to be done during the
    next step, or before it, is counted. On a GPU, events mark the beginnings, so measuring makes nothing wait.

    Args:
        device: The device that forward and backward run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._values: list[Tensor] = []

    def mark_start(self) -> None:
        """Record that a step begins."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def record_value(self, value: Tensor) -> None:
        """Record the value that the step computed."""
        self._values.append(value.detach())

    def seconds(self) -> list[float]:
        """Return the time of each step except the last, which no other step follows."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def values(self) -> list[float]:
        """Return the value of each step."""
        return [float(value) for value in self._values]

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.mark_start()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.record_value(outputs["loss"])

    @override
    def on_predict_batch_start(self, *_: Any) -> None:
        self.mark_start()

    @override
    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.record_value(outputs)
