"""How units share the device: which travel together, which have their own place, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline.gradients.buffers import STAGING_BUFFERS, gradient_bytes
from sp_lightning.pipeline.layout.window_plan import WindowPlan
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.buffers import lay_out
from sp_lightning.pipeline.weights.places import place_in_arena, travel_together
from sp_lightning.pipeline.weights.units import Division, Unit

_DEFAULT_SLOTS = 2  # one computes, one arrives
_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # blocks above 1/6 of the device are divided


class DeviceLayout:
    """One way for units to share the device.

    Attributes:
        k: Units on the device at once, not counting those with a place of their own.
        k_prime: Units that travel together.
        plan: The planner's choice, if this is it.
        parts: Lists of units that travel together, or of one that has a place of its own.
        slots: How many parts are on the device at once.
        kept: Units that have a place of their own.
        units_on_device: Kept units that live on the device, with their gradients and optimizer state.
        staging_buffers: How many gradients, each as large as the largest, are on their way to the host at once.
    """

    def __init__(self, division: Division, k: int, k_prime: int, plan: WindowPlan | None = None) -> None:
        self.k = k
        self.k_prime = k_prime
        self.plan = plan
        self.slots = max(1, k // k_prime)
        units = division.units
        self.units_on_device = [] if plan is None else [unit for unit in units if unit.name in plan.on_device]
        kept = [] if plan is None else [unit for unit in units if unit.name in plan.kept]
        self.kept = {*kept, *self.units_on_device}
        numbers = travel_together(len(units), k_prime, [units.index(unit) for unit in self.kept])
        self.parts = [[units[number] for number in part] for part in numbers]
        self._resident = division.resident
        self._streamed = [unit for unit in division.all_units() if unit not in self.units_on_device]
        self.staging_buffers = STAGING_BUFFERS

    @property
    def on_device_bytes(self) -> int:
        """Device memory for units that live on the device."""
        return 0 if self.plan is None else self.plan.on_device_bytes

    def weight_bytes(self) -> int:
        """Return the device memory for the weights of units, and for all that belongs to units which live there."""
        sizes = [sent_bytes(part) for part in self.parts if part[0] not in self.kept]
        kept = sum(sent_bytes([unit]) for unit in self.kept if unit not in self.units_on_device)
        return place_in_arena(sizes, self.slots)[1] + kept + self.on_device_bytes

    def bytes_of_gradients_on_their_way(self) -> int:
        """Return the device memory for gradients on their way to the host."""
        return self.staging_buffers * max(map(gradient_bytes, self._streamed), default=0)

    def needed_bytes(self) -> int:
        """Return the device memory for weights, and for gradients on their way to the host."""
        return self.weight_bytes() + sent_bytes([self._resident]) + self.bytes_of_gradients_on_their_way()


def choose_device_layout(
    division: Division,
    options: PipelineOptions,
    plan: WindowPlan | None,
    *,
    budget: int | None,
) -> DeviceLayout:
    """Choose the layout that a planner wants, if it fits; else the usual small one; else the smallest.

    Args:
        division: The units.
        options: The user's choices.
        plan: The planner's choice.
        budget: Device memory for all of it; None if no limit is known.

    Raises:
        ValueError: If none fits.
    """

    def fits(layout: DeviceLayout) -> bool:
        return budget is None or layout.needed_bytes() <= budget

    if plan is not None:
        layout = DeviceLayout(division, plan.k, plan.k_prime, plan)
        if fits(layout):  # else weights are sent in another dtype than when the plan was made
            return layout
    together = options.k_prime if isinstance(options.k_prime, int) else 1
    k = options.k if isinstance(options.k, int) else _DEFAULT_SLOTS * together
    layout = DeviceLayout(division, k, together)
    if not fits(layout) and options.k == "auto":
        layout = DeviceLayout(division, together, together)
    if not fits(layout):
        resident = sent_bytes([division.resident])
        gradients = layout.bytes_of_gradients_on_their_way()
        least = max((sent_bytes([unit]) for unit in division.units), default=0) + resident + gradients
        raise ValueError(
            f"`memory_budget={options.memory_budget!r}` is too small with `k={layout.k}`: the units' weights take "
            f"{readable_bytes(layout.weight_bytes())}, resident weights {readable_bytes(resident)}, gradients on their "
            f"way {readable_bytes(gradients)}. It takes at least {least} bytes ({readable_bytes(least)}), with k=1."
        )
    return layout


def largest_unit_bytes(device_bytes: int | None) -> int:
    """Return the size above which blocks are divided where their structure allows it.

    Args:
        device_bytes: The device memory for a step, if that is known.
    """
    return _LARGEST_UNIT_BYTES if device_bytes is None else min(_LARGEST_UNIT_BYTES, device_bytes // _UNITS_PER_DEVICE)


def sent_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes of the weights of units, as they are sent to the device and lie there."""
    return lay_out([weight.compute_bytes for unit in units for weight in unit.weights])[1]


def stepped_bytes(unit: Unit) -> int:
    """Return the bytes that are sent of a unit after a step, if the weights that are not stepped still lie there."""
    _, stepped = lay_out([weight.compute_bytes for weight in unit.weights if weight.master.requires_grad])
    return stepped
