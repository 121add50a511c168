"""torchao's `CPUOffloadOptimizer`: weights on the device, the optimizer and its state on the host.

Written against torchao 0.18.0. The settings, with their reasons:

- `offload_gradients=True`: a gradient's device memory is freed as soon as the gradient is on the host. This rules out
  accumulation, which is not used here.
- The inner optimizer is `torch.optim.AdamW(fused=True)`, torchao's own choice.

Gradients are copied to the host during backward, so clipping would come too late: the documentation rules it out, but
there would be no error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from suite.systems.base import System
from suite.workloads import Kind, Workload


class TorchAO(System):
    """Plain Lightning on the device with torchao's optimizer."""

    name = "torchao"
    title = "torchao CPUOffloadOptimizer"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train"})
    packages = ("torchao",)
    needs_cuda = True

    @override
    def why_not(self, workload: Workload) -> str | None:
        reason = super().why_not(workload)
        if reason is None and workload.clipping is not None:
            return "cannot clip: gradients have left the device before their norm is known"
        return reason

    @override
    def make_optimizer(self, parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.Optimizer:
        from torchao.optim import CPUOffloadOptimizer

        optimizer: Any = CPUOffloadOptimizer(
            parameters, torch.optim.AdamW, offload_gradients=True, lr=workload.learning_rate, fused=True
        )
        # Lightning expects these attributes of an optimizer: default options, and a state to move to the device.
        optimizer.defaults, optimizer.state = {}, {}
        return optimizer
