"""What a Trainer may ask for that does not go with weights in host memory: errors before any work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sp_lightning._namespace import Namespace
from sp_lightning.pipeline import PipelineOptions


def check_processes(options: PipelineOptions, is_distributed: bool, lightning: Namespace) -> None:
    """Refuse options that work in one process only.

    Args:
        options: What the user chose.
        is_distributed: Whether there is more than one process.
        lightning: Where the exception comes from.

    Raises:
        MisconfigurationException: `resident_optimizer` is chosen on several devices.
    """
    lightning.check(
        not (is_distributed and options.resident_optimizer),
        "`resident_optimizer=True` works on one device only: which units live on the device would differ between"
        " processes. Leave it out, or set `Trainer(devices=1, num_nodes=1)`.",
    )


def check_callbacks(callbacks: Iterable[Any], device: torch.device, lightning: Namespace) -> None:
    """Refuse callbacks that would have the model on the device. They copy it in their `setup`, before the strategy's.

    Args:
        callbacks: The Trainer's.
        device: Where the model computes.
        lightning: Where the exception comes from.

    Raises:
        MisconfigurationException: One averages, or prunes, weights on the device.
    """
    if device.type == "cpu":
        return
    for callback in callbacks:
        if isinstance(callback, lightning.averaging):
            _check_averaging(callback, device, lightning)
        # It multiplies weights with masks outside of steps: with the host's what is on the device.
        lightning.check(
            not isinstance(callback, lightning.pruning),
            f"`{type(callback).__name__}` prunes while the model is trained, outside of steps, where"
            " `strategy='superpipeline'` has weights in host memory and their masks on the device. Prune with"
            " `torch.nn.utils.prune` before `fit`, and make it permanent (`prune.remove`) afterwards.",
        )


def _check_averaging(callback: Any, device: torch.device, lightning: Namespace) -> None:
    """Hazard 9: averaging callbacks keep a copy of the whole model on the device by default."""
    name, chosen = type(callback).__name__, callback._device
    lightning.check(
        torch.device(chosen or device).type == "cpu",
        f"`{name}(device={chosen!r})` keeps a second copy of the whole model on {torch.device(chosen or device)}, but"
        f" `strategy='superpipeline'` keeps weights in host memory. Set `{name}(device='cpu')`.",
    )
