"""For systems that shard parameters but do not support zero-dimensional ones, such as CLIP's `logit_scale`."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from typing_extensions import override

from suite.systems.base import System
from suite.workloads import Workload


class WithoutScalars(System):
    """Turns each zero-dimensional parameter into a vector of length one, as FSDP2's error message recommends.

    It is broadcast as before, so all numbers stay the same.
    """

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.dim() == 0:
                    vector = nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad)
                    setattr(owner, name, vector)
        return module
