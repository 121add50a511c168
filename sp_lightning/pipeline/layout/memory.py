"""What an arrangement takes of the device's memory, and of the host's; how units share the former."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch

from sp_lightning.pipeline.gradients.buffers import STAGING_BUFFERS, gradient_bytes
from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.layout.learned import WindowPlan
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.buffers import lay_out
from sp_lightning.pipeline.weights.places import place_in_arena, travel_together
from sp_lightning.pipeline.weights.units import Division, Unit
from sp_lightning.pipeline.weights.weight import Weight

_DEFAULT_SLOTS = 2  # one computes, one arrives
_LARGEST_UNIT_BYTES = 4 << 30
_UNITS_PER_DEVICE = 6  # blocks above 1/6 of the device are divided


class DeviceLayout:
    """One way for units to share the device.

    Attributes:
        plan: The planner's choice, if this is it.
        offsets: Where each other part lies in the arena.
        arena_bytes: The size of the arena.
    """

    def __init__(self, division: Division, k: int, k_prime: int, plan: WindowPlan | None = None) -> None:
        self.k, self.k_prime, self.plan = k, k_prime, plan
        units = division.units
        kept, on_device = ((), ()) if plan is None else (plan.kept, plan.on_device)
        # device memory for units that live on the device
        self.on_device_bytes = 0 if plan is None else plan.on_device_bytes
        # kept units that live on the device, with their gradients and optimizer state
        self.units_on_device = [unit for unit in units if unit.name in on_device]
        # units that have a place of their own
        self.kept = {unit for unit in units if unit.name in kept or unit.name in on_device}
        alone = [number for number, unit in enumerate(units) if unit in self.kept]
        # lists of units that travel together, or of one that has a place of its own
        self.parts = [[units[number] for number in part] for part in travel_together(len(units), k_prime, alone)]
        streamed = [[w for unit in part for w in unit.weights] for part in self.parts if part[0] not in self.kept]
        self.offsets, self.arena_bytes = place_in_arena(list(map(sent_bytes, streamed)), max(1, k // k_prime))
        apart = [division.resident, *(unit for unit in self.kept if unit not in self.units_on_device)]
        leaving = [unit for unit in division.all_units() if unit not in self.units_on_device]
        # device memory for gradients on their way to the host
        self.gradient_bytes = STAGING_BUFFERS * max(map(gradient_bytes, leaving), default=0)
        in_places = self.arena_bytes + sum(sent_bytes(unit.weights) for unit in apart)
        # device memory for all of that, and for weights that have a place of their own
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


_PINNED_SHARE = 0.8  # of the host's memory, so that the rest of the system does not starve


class HostShare:
    """The share of the host's memory that an arrangement takes.

    Attributes:
        pin: Whether to pin weights.
        pin_gradients: Whether to pin gradients.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend, pin_memory: bool | str, processes: int) -> None:
        self._processes = processes
        self._weights = [weight for unit in units for weight in unit.weights]
        self._gradient_bytes = sum(map(gradient_bytes, units))
        weight_bytes = sum(weight.compute_bytes for weight in self._weights)
        both, total = weight_bytes + self._gradient_bytes, total_host_memory()
        may_pin = backend.can_pin and pin_memory is not False
        self.pin = self.pin_gradients = may_pin
        # bytes that may be pinned besides weights and gradients; None if there is no limit
        self.pinnable = None if may_pin else 0
        if may_pin and pin_memory is not True and total:
            limit = int(_PINNED_SHARE * total) // processes
            self.pin, self.pin_gradients = weight_bytes <= limit, both <= limit
            self.pinnable = limit - self.pin * weight_bytes - self.pin_gradients * self._gradient_bytes
            if not self.pin_gradients:
                warnings.warn(
                    f"Pinning {readable_bytes(weight_bytes)} of weights and {readable_bytes(self._gradient_bytes)} of "
                    f"gradients would page-lock more than {_PINNED_SHARE:.0%} of the host's {readable_bytes(total)}. "
                    f"{'Gradients' if self.pin else 'Both'} are left as they are, which makes copies slow. "
                    "`pin_memory=True` page-locks everything.",
                    stacklevel=2,
                )

    def check(self, moving: int, at_once: int) -> None:
        """Refuse an arrangement that does not fit.

        Args:
            moving: Bytes that exist twice for a moment, while weights are laid out.
            at_once: How many processes take their share at this moment.

        Raises:
            ValueError: If host memory does not suffice.
        """
        free = available_host_memory()
        gradients = [weight.master.grad for weight in self._weights if weight.master.grad is not None]
        present = sum(gradient.nbytes for gradient in gradients if gradient.layout is torch.strided)
        coming = max(0, self._gradient_bytes - present)
        needed = coming + sum(weight.compute_bytes for weight in self._weights if weight.lowered) + moving
        if free is not None and needed * at_once > free:
            each = f" in each of {at_once} processes" if at_once > 1 else ""
            raise ValueError(
                f"Host memory is too small: {readable_bytes(needed)} are needed on top of the model{each} "
                f"({readable_bytes(coming)} for gradients, the rest for copies of weights; optimizer state is not "
                f"counted), and {readable_bytes(free)} are free. Use a machine with more memory, or freeze weights"
                f"{', or train on fewer devices (`Trainer(devices=1)`)' if self._processes > 1 else ''}."
            )
