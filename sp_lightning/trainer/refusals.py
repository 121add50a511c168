"""Checks for Trainer arguments that do not work with weights in host memory: errors before any work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sp_lightning.pipeline import PipelineOptions
from sp_lightning.trainer._namespace import Namespace


def check_processes(options: PipelineOptions, is_distributed: bool, lightning: Namespace) -> None:
    """Refuse options that work in one process only.

    Args:
        options: The user's options.
        is_distributed: Whether there is more than one process.
        lightning: The namespace of the exception.

    Raises:
        MisconfigurationException: If `resident_optimizer` is chosen on several devices.
    """
    lightning.check(
        not (is_distributed and options.resident_optimizer),
        "`resident_optimizer=True` works on one device only: which units live on the device would differ between"
        " processes. Leave it out, or set `Trainer(devices=1, num_nodes=1)`.",
    )


def check_callbacks(callbacks: Iterable[Any], device: torch.device, lightning: Namespace) -> None:
    """Refuse callbacks that copy the model to the device, before their `setup`, which runs before the strategy's.

    Args:
        callbacks: The Trainer's callbacks.
        device: The device that forward and backward run on.
        lightning: The namespace of the exception.

    Raises:
        MisconfigurationException: If a callback would average weights on the device.
    """
    if device.type == "cpu":
        return
    for callback in callbacks:
        if isinstance(callback, lightning.averaging):
            _check_averaging(callback, device, lightning)


def _check_averaging(callback: Any, device: torch.device, lightning: Namespace) -> None:
    """Refuse an averaging callback whose copy of the model is on the device, which is the default."""
    name, chosen = type(callback).__name__, callback._device
    lightning.check(
        torch.device(chosen or device).type == "cpu",
        f"`{name}(device={chosen!r})` keeps a second copy of the whole model on {torch.device(chosen or device)}, but"
        f" `strategy='superpipeline'` keeps weights in host memory. Set `{name}(device='cpu')`.",
    )
