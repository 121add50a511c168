"""diffusers' group offloading, on any module: groups of layers are copied on a separate stream while others compute.

Written against diffusers 0.42.1. The settings, with their reasons:

- `offload_type="leaf_level"`: according to its documentation, this takes the least memory, and is as fast as the others
  if there are streams. `block_level` finds lists of blocks only among a module's own children, and moves everything
  else (embeddings, the head) without a stream, without pinned memory, and back to the host again.
- `use_stream=True`: weights are pinned once, and copied ahead of time in the order of the first forward.
- `record_stream=True`: the host need not wait for the device before it drops a group's weights.
"""

from __future__ import annotations

from typing import ClassVar

import lightning as L
import torch
from typing_extensions import override

from suite.systems.base import System
from suite.workloads import Kind, Workload


class Diffusers(System):
    """`apply_group_offloading` of the whole network."""

    name = "diffusers"
    title = "diffusers group offloading"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"inference"})
    packages = ("diffusers",)
    runs_in_trainer = False

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        from diffusers.hooks import apply_group_offloading

        streams = device.type == "cuda"  # diffusers refuses streams on a CPU, which has none
        apply_group_offloading(
            module.network,
            onload_device=device,
            offload_type="leaf_level",
            non_blocking=streams,
            use_stream=streams,
            record_stream=streams,
        )
        return module
