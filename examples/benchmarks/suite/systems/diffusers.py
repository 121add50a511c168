"""diffusers' group offloading, on any module: groups of layers come up on a stream of their own while others compute.

Read against diffusers 0.42.1. The settings, and why:

- `offload_type="leaf_level"`: its documentation has it as the one that takes least memory, and as fast as others where
  there are streams. `block_level` finds lists of blocks only among a module's own children, and moves what lies beside
  them (embeddings, the head) without a stream, without page-locked memory, and back to the host again.
- `use_stream=True`: weights are page-locked once, and copied ahead of time in the order of the first forward.
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

        streams = device.type == "cuda"  # there are none on a CPU, and diffusers refuses
        apply_group_offloading(
            module.network,
            onload_device=device,
            offload_type="leaf_level",
            non_blocking=streams,
            use_stream=streams,
            record_stream=streams,
        )
        return module
