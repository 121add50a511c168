"""accelerate's `cpu_offload`: each module's weights are copied to the device before its forward, and dropped after it.

Written against accelerate 1.15.0. The weights are pinned first, which accelerate does not do by itself but any user can
do: its copies then run at the speed of the link, although computing waits for each of them.
"""

from __future__ import annotations

from typing import ClassVar

import lightning as L
import torch
from typing_extensions import override

from suite.systems.base import System
from suite.workloads import Kind, Workload


class Accelerate(System):
    """`cpu_offload` of the whole network."""

    name = "accelerate"
    title = "accelerate cpu_offload"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"inference"})
    packages = ("accelerate",)
    runs_in_trainer = False

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        from accelerate import cpu_offload

        if device.type == "cuda":
            for parameter in module.parameters():
                parameter.data = parameter.data.pin_memory()
        cpu_offload(module.network, device)
        return module
