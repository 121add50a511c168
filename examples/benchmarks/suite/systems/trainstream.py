"""TrainStream: gradients, AdamW, activations and weights on the host, placed by its own planner.

Written against trainstream 0.4.1. `wrap` takes the network on the host and an AdamW, and returns an optimizer that
steps on the host. The settings, with their reasons:

- `max_grad_norm` is the workload's clipping, and the Trainer does not clip: gradients have left the device by then.
- `blocks` are the network's, and `quantize="none"`: it would quantize frozen weights where memory is short.
- All else is its own choice, which it takes from the memory that torch's allocator may use. If everything fits, it goes
  over to torch's AdamW on the device.
- With a budget, the allocator is limited to it. Activations are then paged by a fixed share, all of them at the least
  budget: left to itself, it would measure its first steps with all of them on the device. `offload=True` keeps the
  state on the host, because whether that fits is judged by a peak without the paged activations.

In `bf16-mixed`, weights are fp32 and move as such; `trainstream-bf16` has them in bf16, with fp32 masters on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from typing_extensions import override

from suite.networks import Network
from suite.systems.base import System
from suite.workloads import Kind, Window, Workload


class TrainStream(System):
    """`trainstream.wrap` of the whole network."""

    name = "trainstream"
    title = "TrainStream"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train"})
    packages = ("trainstream",)
    needs_cuda = True
    takes_budgets = True

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        super().__init__(window, budget)
        self._device = torch.device("cpu")
        self._network: Network | None = None

    @override
    def device_limit(self, workload: Workload) -> int | None:
        return workload.device_limit if self.budget is None else self.budget

    @override
    def checkpoints_blocks(self, workload: Workload) -> bool:
        return False  # it pages activations

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        self._device, self._network = device, module.network
        return module

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        strategy = _TrainStreamStrategy(self._device)
        return {"strategy": strategy, "precision": workload.precision, "gradient_clip_val": None}

    @override
    def make_optimizer(self, parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.Optimizer:
        import trainstream

        assert self._network is not None
        options: dict[str, Any] = {}
        if self.budget is not None:
            options = {"activation_offload": 1 - self.share_on_device(workload), "offload": True}
        _, optimizer = trainstream.wrap(
            self._network,
            torch.optim.AdamW(parameters, lr=workload.learning_rate),
            device=self._device,
            blocks=self._network.blocks(),
            max_grad_norm=workload.clipping,
            quantize="none",
            **options,
        )
        return optimizer

    @override
    def facts(self) -> dict[str, Any]:
        import trainstream

        report = trainstream.memory_report(self._network)
        return {"trainstream": trainstream.__version__, "resident": report["resident"], "events": report["events"]}


class TrainStreamBF16(TrainStream):
    """The same with weights in bf16, which halves what is copied; masters stay fp32."""

    name = "trainstream-bf16"
    title = "TrainStream, bf16 parameters"

    @override
    def why_not(self, workload: Workload) -> str | None:
        reason = super().why_not(workload)
        if reason is None and workload.precision != "bf16-mixed":
            return "is the same as trainstream, except under bf16-mixed"
        return reason

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {**super().trainer_arguments(workload), "precision": "bf16-true"}


class _TrainStreamStrategy(SingleDeviceStrategy):
    """Leaves weights where `wrap` puts them."""

    @override
    def model_to_device(self) -> None:
        pass

    @override
    def teardown(self) -> None:
        """Do nothing, because to move the module would first copy all state; the process ends anyway."""
