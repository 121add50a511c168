"""How units share the device: which travel together, which have their own place, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sp_lightning.pipeline.activations.ways import Policy
from sp_lightning.pipeline.gradients.buffers import STAGING_BUFFERS, gradient_bytes
from sp_lightning.pipeline.lanes.trace import Lane
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.buffers import lay_out
from sp_lightning.pipeline.weights.places import place_in_arena, travel_together
from sp_lightning.pipeline.weights.units import Division
from sp_lightning.pipeline.weights.weight import Weight

_DEFAULT_SLOTS = 2  # one computes, one arrives
_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # blocks above 1/6 of the device are divided


@dataclass(frozen=True)
class WindowPlan:
    """A planner's choice for the window, and what it is expected to cost.

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


class DeviceLayout:
    """One way for units to share the device.

    Attributes:
        plan: The planner's choice, if this is it.
        parts: Lists of units that travel together, or of one that has a place of its own.
        kept: Units that have a place of their own.
        units_on_device: Kept units that live on the device, with their gradients and optimizer state.
        offsets: Where each other part lies in the arena.
        arena_bytes: The size of the arena.
        on_device_bytes: Device memory for units that live on the device.
        gradient_bytes: Device memory for gradients on their way to the host.
        needed_bytes: Device memory for all of that, and for weights that have a place of their own.
    """

    def __init__(self, division: Division, k: int, k_prime: int, plan: WindowPlan | None = None) -> None:
        self.k, self.k_prime, self.plan = k, k_prime, plan
        units = division.units
        kept, on_device = ((), ()) if plan is None else (plan.kept, plan.on_device)
        self.on_device_bytes = 0 if plan is None else plan.on_device_bytes
        self.units_on_device = [unit for unit in units if unit.name in on_device]
        self.kept = {unit for unit in units if unit.name in kept or unit.name in on_device}
        alone = [number for number, unit in enumerate(units) if unit in self.kept]
        self.parts = [[units[number] for number in part] for part in travel_together(len(units), k_prime, alone)]
        streamed = [[w for unit in part for w in unit.weights] for part in self.parts if part[0] not in self.kept]
        self.offsets, self.arena_bytes = place_in_arena(list(map(sent_bytes, streamed)), max(1, k // k_prime))
        apart = [division.resident, *(unit for unit in self.kept if unit not in self.units_on_device)]
        leaving = [unit for unit in division.all_units() if unit not in self.units_on_device]
        self.gradient_bytes = STAGING_BUFFERS * max(map(gradient_bytes, leaving), default=0)
        in_places = self.arena_bytes + sum(sent_bytes(unit.weights) for unit in apart)
        self.needed_bytes = in_places + self.on_device_bytes + self.gradient_bytes


def choose_device_layout(
    division: Division, options: PipelineOptions, plan: WindowPlan | None, budget: int | None
) -> DeviceLayout:
    """Choose the layout that a planner wants, if it fits; else the usual small one; else the smallest.

    The planner's does not if weights are sent in another dtype than when the plan was made.

    Args:
        division: The units.
        options: The user's choices.
        plan: The planner's choice.
        budget: Device memory for all of it; None if no limit is known.

    Raises:
        ValueError: If none fits.
    """
    together = options.k_prime if isinstance(options.k_prime, int) else 1
    k = options.k if isinstance(options.k, int) else _DEFAULT_SLOTS * together
    windows = [(k, together, None), *([(together, together, None)] if options.k == "auto" else [])]
    for window in [(plan.k, plan.k_prime, plan), *windows] if plan is not None else windows:
        layout = DeviceLayout(division, *window)
        if budget is None or layout.needed_bytes <= budget:
            return layout
    least = DeviceLayout(division, 1, 1).needed_bytes
    raise ValueError(
        f"`memory_budget={options.memory_budget!r}` is too small with `k={layout.k}`: weights, and gradients on their "
        f"way to the host, take {readable_bytes(layout.needed_bytes)}. It takes at least {least} bytes "
        f"({readable_bytes(least)}), with k=1."
    )


def largest_unit_bytes(device_bytes: int | None) -> int:
    """Return the size above which blocks are divided where their structure allows it.

    Args:
        device_bytes: The device memory for a step, if that is known.
    """
    return _LARGEST_UNIT_BYTES if device_bytes is None else min(_LARGEST_UNIT_BYTES, device_bytes // _UNITS_PER_DEVICE)


def sent_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights as they are sent to the device, and lie there."""
    return lay_out([weight.compute_bytes for weight in weights])[1]
