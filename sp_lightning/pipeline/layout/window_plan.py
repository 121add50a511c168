"""A planner's choice for the window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sp_lightning.pipeline.activations.ways import Policy
from sp_lightning.pipeline.lanes.trace import Lane


@dataclass(frozen=True)
class WindowPlan:
    """The choice, and what it is expected to cost.

    Attributes:
        k: Units on the device at once, not counting those in `kept` and `on_device`.
        k_prime: Units that travel together.
        kept: Names of units that have a place of their own: they are sent only when their weights have changed.
        on_device: Names of units that live on the device, with their gradients and optimizer state.
        on_device_bytes: Device memory that `on_device` units take.
        step_seconds: Expected duration of a step.
        bottleneck: The lane that has most to do.
        device_bytes: Expected device memory for weights, gradients on their way to the host and activations.
        activation_bytes: The part of it that activations take.
        policies: What becomes of each unit's activations, by the unit's name, if that was left to the planner.
    """

    k: int
    k_prime: int
    kept: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()
    on_device_bytes: int = 0
    step_seconds: float = 0.0
    bottleneck: Lane = Lane.COMPUTE
    device_bytes: int = 0
    activation_bytes: int = 0
    policies: Mapping[str, Policy] = field(default_factory=dict)
