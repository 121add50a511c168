"""What a system is: how one way to fit a model into memory is asked to train or to predict.

All systems run the same `BenchModule` on the same batches under the same clock. A system says which Trainer it wants,
which optimizer, and what it does to the module before; it neither builds the model nor measures itself. Each gets the
settings that its own documentation recommends for one device, written down beside the code with the reason.

The order in a process of its own (see `worker.py`):

    why_not                  None, or the reason that is reported in place of numbers; asked by the bench beforehand
    prepare                  once the module has its weights, on the host
    trainer_arguments        then the Trainer runs `fit` or `predict`, in which Lightning calls
        configure_model          where FSDP2 shards
        make_optimizer           as `configure_optimizers`
    waits, facts             after the run
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from suite.workloads import Kind, Window, Workload

if TYPE_CHECKING:
    import lightning as L


class System:
    """One way to run a workload.

    Args:
        window: k and k_prime; None leaves the choice to the system.

    Attributes:
        name: What it is called on the command line and in JSON.
        title: What it is called in tables.
        kinds: What it can do.
        packages: Modules that it imports beyond the package's own dependencies.
        needs_cuda: Whether it does not work on the CPU.
        takes_windows: Whether it has k and k_prime. Those that do are measured with each of `Workload.windows`.
        runs_in_trainer: Whether the Trainer runs it. If not, `predict_step` of the module that `prepare` returns is
            called in a plain loop, with batches on the device: for systems that place the weights themselves, where a
            strategy of Lightning would move them.
        offloads: Whether weights, gradients or optimizer state live on the host. The limit of a system that does not is
            computing alone.
        observed_steps: Steps that it wants after those that are measured, to look at itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train", "inference"})
    packages: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False
    takes_windows: ClassVar[bool] = False
    runs_in_trainer: ClassVar[bool] = True
    offloads: ClassVar[bool] = True
    observed_steps: ClassVar[int] = 0

    def __init__(self, window: Window | None = None) -> None:
        self.window = window

    def why_not(self, workload: Workload) -> str | None:
        """Say why it cannot run the workload on this machine, as far as that is known beforehand."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{', '.join(missing)} is not installed"
        if workload.kind not in self.kinds:
            return f"does not do {'training' if workload.kind == 'train' else 'inference'}"
        if self.needs_cuda and not torch.cuda.is_available():
            return "needs a GPU"
        return None

    def checkpoints_blocks(self, workload: Workload) -> bool:
        """Whether the model's own activation checkpointing is on; systems that choose for activations say no."""
        return workload.checkpointing

    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        """Do what comes before the Trainer; return the module to run.

        Args:
            module: With its weights, on the host.
            workload: What it will do.
            device: Where it will compute.
        """
        return module

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        """Arguments of the Trainer: strategy, precision, plugins, callbacks. Not devices, nor clipping or steps."""
        return {"strategy": "auto", "precision": workload.precision}

    def configure_model(self, module: L.LightningModule, workload: Workload) -> None:
        """Called by Lightning as the module's `configure_model`: in the strategy's contexts, before optimizers."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.Optimizer:
        """Make the optimizer of what learns: AdamW, by torch's fused kernel."""
        optimizer = torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True)
        # Lightning refuses to clip for one that may unscale gradients by itself; nothing is scaled here.
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def waits(self) -> dict[str, float] | None:
        """Seconds, shares and rates that the system measured of itself after the run; None if it does not."""
        return None

    def facts(self) -> dict[str, Any]:
        """What else the system says about the run: what it chose, what it counted."""
        return {}
