"""Lightning's `DeepSpeedStrategy` with offload: ZeRO-2 (optimizer on the host) and ZeRO-3 (weights on the host, too).

Written against deepspeed 0.19.8 and lightning 2.6.6. The settings are passed as DeepSpeed's own configuration, because
the strategy's arguments cover only some of them. These settings differ from the defaults:

- `pin_memory` is on: Lightning's default is off, DeepSpeed's is on, and pageable copies never overlap.
- `DeepSpeedCPUAdam` is the optimizer, as both recommend, with the defaults of `torch.optim.AdamW`.
- `reduce_bucket_size` is 5e7 elements, the default of `stage3_prefetch_bucket_size`. Nothing is reduced on one device:
  a bucket only collects gradients, and two of 2e8 (Lightning's default) or 5e8 (DeepSpeed's) elements would take 0.8 or
  2 GB of the device.
- `overlap_comm` is on, so gradients are copied to the host on a separate stream.
- `sub_group_size` is DeepSpeed's 1e9, because Lightning's 1e12 would step and copy the whole model at once.
- `check_grad_overflow` is off: bf16 has fp32's range, and plain training does not look for infinities either.
- Under `bf16-true`, masters and moments are bf16, as in plain training.
- Zero-dimensional parameters become vectors of length one, because ZeRO's broadcast fails for them.

With more device memory, ZeRO-3 leaves a share of the model there: `stage3_model_persistence_threshold` is that share of
all parameters, without a threshold for a single one, and `ratio` is the share of the optimizer that stays on the host.
The latter goes by whole groups, so `sub_group_size` is 1e8 then.

Under `bf16-mixed`, DeepSpeed keeps weights in bf16 and masters in fp32 instead of casting per operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from typing_extensions import override

from suite.systems.scalars import WithoutScalars
from suite.workloads import Kind, Window, Workload

_ADAMW_WEIGHT_DECAY = 0.01  # the default of torch.optim.AdamW; that of DeepSpeedCPUAdam is 0


class DeepSpeedZeRO2(WithoutScalars):
    """ZeRO-2: weights on the device; masters, gradients and optimizer on the host."""

    name = "deepspeed-zero2"
    title = "DeepSpeed ZeRO-2 offload"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train"})
    packages = ("deepspeed",)
    needs_cuda = True
    stage: ClassVar[int] = 2

    def config(self, workload: Workload) -> dict[str, Any]:
        """Return DeepSpeed's configuration.

        Lightning adds clipping. The batch size is set here because Lightning would ask a batch sampler for it.
        """
        zero = {
            "stage": self.stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": 50_000_000,
        }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.samples,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        if workload.precision.startswith("bf16"):
            config["bf16"] = {
                "enabled": True,
                "check_grad_overflow": False,
                "bf16_master_weights_and_grads": workload.precision == "bf16-true",
                "bf16_optimizer_states": workload.precision == "bf16-true",
            }
        return config

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        return {"strategy": DeepSpeedStrategy(config=self.config(workload)), "precision": workload.precision}

    @override
    def make_optimizer(self, parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(
            list(parameters),
            lr=workload.learning_rate,
            weight_decay=_ADAMW_WEIGHT_DECAY,
            fp32_optimizer_states=workload.precision != "bf16-true",
        )

    @override
    def facts(self) -> dict[str, Any]:
        import deepspeed

        return {"deepspeed": deepspeed.__version__}


class DeepSpeedZeRO3(DeepSpeedZeRO2):
    """ZeRO-3: weights are on the host, too, and fetched module by module."""

    name = "deepspeed-zero3"
    title = "DeepSpeed ZeRO-3 offload"
    takes_budgets = True
    stage: ClassVar[int] = 3

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        super().__init__(window, budget)
        self._parameters = 0

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        self._parameters = sum(parameter.numel() for parameter in module.parameters())
        return super().prepare(module, workload, device)

    @override
    def config(self, workload: Workload) -> dict[str, Any]:
        config = super().config(workload)
        config["zero_optimization"] |= {
            "offload_param": {"device": "cpu", "pin_memory": True},
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
        share = self.share_on_device(workload)
        if share:
            config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": self._parameters,
                "stage3_model_persistence_threshold": int(share * self._parameters),
                "sub_group_size": 100_000_000,
            }
            config["zero_optimization"]["offload_optimizer"]["ratio"] = 1 - share
        return config

    @override
    def configure_model(self, module: L.LightningModule, workload: Workload) -> None:
        """Hand the weights to DeepSpeed one by one; otherwise it would start with the whole model on the device."""
        import deepspeed

        strategy = module.trainer.strategy
        dtype = torch.bfloat16 if workload.precision.startswith("bf16") else torch.float32
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        for buffer in module.buffers():  # DeepSpeed moves buffers only if it moves the model
            buffer.data = buffer.data.to(strategy.root_device)
        deepspeed.zero.Init(module=module, config_dict_or_path=strategy.config)
