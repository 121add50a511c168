"""Checks for Trainer arguments that do not work with weights in host memory: errors before any work."""

from __future__ import annotations

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
