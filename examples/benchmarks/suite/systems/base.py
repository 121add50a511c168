"""The interface of a system, which is one way to fit a model into memory for training or prediction.

All systems run the same `BenchModule` on the same batches under the same clock. A system chooses the arguments of the
Trainer and the optimizer, and may modify the module beforehand; it neither builds the model nor measures itself. Each
gets the settings that its own documentation recommends for one device, with the reasons next to the code.

The order of calls in a process (see `worker.py`):

    why_not                  called beforehand: None, or the reason to report instead of numbers
    prepare                  when the module has its weights, on the host
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
        budget: Bytes of device memory, one of `Workload.budgets`; None for all there is.

    Attributes:
        name: Name on the command line and in JSON.
        title: Name in tables.
        kinds: Kinds of workloads that it supports.
        packages: Modules that it imports beyond the package's own dependencies.
        needs_cuda: Whether it does not work on the CPU.
        takes_windows: Whether it has k and k_prime. If so, it is measured with each of `Workload.windows`.
        takes_budgets: Whether a setting decides how much device memory it takes. If so, it is measured with each of
            `Workload.budgets`.
        runs_in_trainer: Whether the Trainer runs it. If not, `predict_step` of the module that `prepare` returns is
            called in a plain loop, with batches on the device. This is for systems that place the weights themselves,
            because a Lightning strategy would move them.
        offloads: Whether weights, gradients or optimizer state live on the host. If not, the system's limit is
            computing alone.
        observed_steps: Additional steps after the measured ones, in which the system may observe itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train", "inference"})
    packages: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False
    takes_windows: ClassVar[bool] = False
    takes_budgets: ClassVar[bool] = False
    runs_in_trainer: ClassVar[bool] = True
    offloads: ClassVar[bool] = True
    observed_steps: ClassVar[int] = 0

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        self.window = window
        self.budget = budget

    def why_not(self, workload: Workload) -> str | None:
        """Return why it cannot run the workload on this machine, as far as that is known beforehand; None if it can."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{', '.join(missing)} is not installed"
        if workload.kind not in self.kinds:
            return f"does not do {'training' if workload.kind == 'train' else 'inference'}"
        if self.needs_cuda and not torch.cuda.is_available():
            return "needs a GPU"
        return None

    def device_limit(self, workload: Workload) -> int | None:
        """Return the bytes of device memory that torch may use in the process; None for all there is."""
        return workload.device_limit

    def share_on_device(self, workload: Workload) -> float:
        """Return where the budget stands among the workload's: from 0.0, the least, to 1.0; 0.0 if there are none.

        It is for systems that take no bytes, but can be told how much of the model to leave on the device.
        """
        if not workload.budgets:
            return 0.0
        return workload.budgets.index(self.budget) / (len(workload.budgets) - 1)

    def checkpoints_blocks(self, workload: Workload) -> bool:
        """Tell whether to use the model's activation checkpointing; systems that manage activations return False."""
        return workload.checkpointing

    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        """Prepare the module before the Trainer is built, and return the module to run.

        Args:
            module: The module with its weights, on the host.
            workload: The workload to run.
            device: The device that it will compute on.
        """
        return module

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        """Return the Trainer's strategy, precision, plugins and callbacks, but not devices or steps.

        A system that clips by itself returns `gradient_clip_val=None`, too.
        """
        return {"strategy": "auto", "precision": workload.precision}

    def configure_model(self, module: L.LightningModule, workload: Workload) -> None:
        """Modify the module in Lightning's `configure_model`: in the strategy's contexts, before optimizers exist."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter], workload: Workload) -> torch.optim.Optimizer:
        """Make the optimizer of the trainable parameters: AdamW with torch's fused kernel."""
        optimizer = torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True)
        # Lightning refuses to clip for an optimizer that may unscale gradients itself; nothing is scaled here.
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def waits(self) -> dict[str, float] | None:
        """Return the seconds, shares and rates that the system measured of itself; None if it does not measure any."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what else the system reports about the run: its choices and counters."""
        return {}
