"""All systems. Each has its own file; `base.py` defines what they have in common."""

from suite.systems.accelerate import Accelerate
from suite.systems.base import System
from suite.systems.deepspeed import DeepSpeedZeRO2, DeepSpeedZeRO3
from suite.systems.device import Device
from suite.systems.diffusers import Diffusers
from suite.systems.fsdp2 import FSDP2
from suite.systems.paper import Paper
from suite.systems.superpipeline import Superpipeline, SuperpipelineLeast, SuperpipelineRecompute
from suite.systems.torchao import TorchAO
from suite.systems.trainstream import TrainStream, TrainStreamBF16
from suite.workloads import Window

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        Device,
        Superpipeline,
        SuperpipelineRecompute,
        SuperpipelineLeast,
        Paper,
        DeepSpeedZeRO2,
        DeepSpeedZeRO3,
        FSDP2,
        TrainStream,
        TrainStreamBF16,
        TorchAO,
        Accelerate,
        Diffusers,
    )
}
"""All systems by name, in the order of the table: the ceiling comes first."""


def make_system(name: str, window: Window | None = None, budget: int | None = None) -> System:
    """Make the system with the given name.

    Args:
        name: One of `SYSTEMS`.
        window: k and k_prime, for a system that takes them.
        budget: Bytes of device memory, for a system that takes them.

    Raises:
        ValueError: If there is no such system, or it does not take a window or a budget.
    """
    if name not in SYSTEMS:
        raise ValueError(f"There is no system {name!r}, only {', '.join(SYSTEMS)}.")
    if window is not None and not SYSTEMS[name].takes_windows:
        raise ValueError(f"The system {name!r} has neither k nor k_prime.")
    if budget is not None and not SYSTEMS[name].takes_budgets:
        raise ValueError(f"The system {name!r} takes no budget of device memory.")
    return SYSTEMS[name](window, budget)
