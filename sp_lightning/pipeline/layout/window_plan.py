"""What a planner chooses for the window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sp_lightning.pipeline.activations.choice import Policy


@dataclass(frozen=True)
class WindowPlan:
    """What was chosen, and why.

    Attributes:
        k: Units on the device at once, resident ones and those that live there not counted.
        k_prime: Units moved together.
        resident: Names of units that have a place of their own: they are sent when their weights have changed.
        on_device: Names of units that live on the device, with their gradients and optimizer state.
        on_device_bytes: What these take.
        step_seconds: How long a step is expected to take.
        bottleneck: Which lane has most to do: "compute", "to device", "to host" or "host".
        device_bytes: Device memory that weights, gradients on their way and activations are expected to take.
        activation_bytes: What activations take of it.
        policies: What happens to the activations of each unit, by its name, if that was left to choose.
    """

    k: int
    k_prime: int
    resident: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()
    on_device_bytes: int = 0
    step_seconds: float = 0.0
    bottleneck: str = "compute"
    device_bytes: int = 0
    activation_bytes: int = 0
    policies: Mapping[str, Policy] = field(default_factory=dict)
