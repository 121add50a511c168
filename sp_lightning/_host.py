"""The host as the optimizer's machine: torch's fused CPU kernels, and all of its cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from sp_lightning.pipeline.stepping import fused_kernel_works

FUSED = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel. Exactly these classes: what a subclass does in `step` is not known."""


@contextmanager
def fused_kernels(optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Let `optimizer` take its fused CPU kernels in here, where the user left the choice to torch.

    On the CPU torch chooses its slowest path by default, one op at a time over memory (pytorch#74588). The flag goes
    into the param group between `closure` and the end of the step only, so that a checkpoint has what the user chose.
    `_step_supports_amp_scaling` stays unset, or Lightning would refuse to clip under a loss scaler (hazard 15).

    Args:
        optimizer: The optimizer about to step.
        closure: What it calls to have gradients: only then is known whether they are sparse, which no kernel takes.

    Yields:
        The closure to step with.
    """
    fused: list[dict[str, Any]] = []

    def then_fuse() -> Any:
        result = closure()
        fused.extend(group for group in optimizer.param_groups if _fusible(type(optimizer), group))
        for group in fused:
            group["fused"] = True
        return result

    try:
        yield then_fuse
    finally:
        for group in fused:
            group["fused"] = None


def _fusible(cls: type[Optimizer], group: dict[str, Any]) -> bool:
    if cls not in FUSED or group.get("fused", False) is not None or group.get("foreach") is not None:
        return False
    if group.get("differentiable") or group.get("capturable"):
        return False
    return all(
        param.device.type == "cpu"
        and param.is_floating_point()
        and (param.grad is None or not param.grad.is_sparse)
        and fused_kernel_works(cls.__name__, param.dtype)
        for param in group["params"]
    )


def use_all_cores() -> int | None:
    """Give torch every core that this process may use, if a launcher left it with one thread.

    `torchrun` sets `OMP_NUM_THREADS=1` to spare the cores for its other processes. Here there are none, and the
    optimizer steps on the host: on one thread it would take as many times longer as there are cores. A user's own
    `OMP_NUM_THREADS=1` outside of `torchrun` is a choice, and kept.

    Returns:
        The number of threads that torch had, to be restored later, or `None` if nothing was changed.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    chosen = "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if threads > 1 or cores == 1 or chosen:
        return None
    torch.set_num_threads(cores)
    return threads
