"""FSDP2 with `CPUOffloadPolicy`, in Lightning's `ModelParallelStrategy`, with a single process.

Written against torch 2.15 and lightning 2.6.6. The settings, with their reasons:

- Each block is its own group, and the rest of the model belongs to the root, as in FSDP2's documentation and
  torchtitan.
- `CPUOffloadPolicy(pin_memory=True)` is the default: weights, gradients and optimizer state are in pinned memory.
- `bf16-mixed` is FSDP2's own `MixedPrecisionPolicy`: masters stay fp32 and blocks compute in bf16. Autocast on top of
  it would find nothing left to cast. Gradients are also reduced in bf16: with one process, nothing is added up.
- The process group uses gloo in addition to nccl, because without it the norm of gradients on the host cannot be
  computed (pytorch#148532).
- Zero-dimensional parameters become vectors of length one, as `fully_shard` requires.
- With more device memory, the first blocks are not offloaded: they are groups without `CPUOffloadPolicy`, and the
  optimizer steps them on the device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from suite.systems.scalars import WithoutScalars
from suite.workloads import Kind, Workload


class FSDP2(WithoutScalars):
    """`fully_shard` for each block, with weights on the host."""

    name = "fsdp2"
    title = "FSDP2, CPU offload"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train"})
    takes_budgets = True

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        strategy = _HostStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend=backend)
        precision = "32-true" if workload.precision == "bf16-mixed" else workload.precision
        return {"strategy": strategy, "precision": precision}

    @override
    def configure_model(self, module: L.LightningModule, workload: Workload) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        settings = {
            "mesh": module.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if workload.precision == "bf16-mixed" else None
            ),
        }
        on_host, on_device = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()), OffloadPolicy()
        blocks = module.network.blocks()
        resident = round(self.share_on_device(workload) * len(blocks))
        for number, block in enumerate(blocks):
            fully_shard(block, **settings, offload_policy=on_device if number < resident else on_host)
        rest = on_device if resident == len(blocks) else on_host
        fully_shard(module.network, **settings, offload_policy=rest)


class _HostStrategy(ModelParallelStrategy):
    """Leaves weights on the host, where `CPUOffloadPolicy` wants them; buffers were moved by `fully_shard`."""

    @override
    def model_to_device(self) -> None:
        pass
