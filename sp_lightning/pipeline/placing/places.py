"""The memory that weights take on the device and on the host; how units share the device's.

[Note: places in the arena]
A unit has the same place for as long as the plan is in force, so raw aliases of its weights (a tensor stashed on an
autograd `ctx`, one held by a checkpoint) are valid from its load to the end of its backward. Places are chosen so that
any `window` consecutive units do not overlap: with equal sizes, "unit u has slot u mod k"; with unequal sizes, a
large embedding does not inflate every slot, and lies next to the last groups, too, as it may be the head. Units whose
places overlap cannot be on the device at once: loading one evicts the others. Evicting moves nothing, because the host
has the truth.

    12 blocks, k = 3      slot 0   slot 1   slot 2
    forward of block 4      3        4        5      <- 5 arrives while 4 computes
    forward of block 5      6        4        5      <- 3 is done: its slot takes 6
    ...
    backward of block 11    9       10       11      <- the last three stay for the turn
    backward of block 10    9       10        8
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.options import PipelineOptions, Policy
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.pipeline.units.unit import Division, Unit
from sp_lightning.pipeline.weights.buffers import lay_out
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class WindowPlan:
    """A planner's choice for the window, and its expected costs."""

    k: int  # units on the device at once, not counting those in `on_device`
    # names of units that stay on the device, with their gradients and optimizer state; also that of resident weights
    on_device: tuple[str, ...] = ()
    # names of units that are updated on the device, while their state passes through
    visiting: tuple[str, ...] = ()
    # names of units whose gradients wait on the device until the units are updated
    waiting: tuple[str, ...] = ()
    # whether `visiting` units are updated only as the next forward loads them, which sends their weights once less
    defers_visits: bool = False
    on_device_bytes: int = 0  # device memory that `on_device` units take
    step_seconds: float = 0.0  # expected duration of a step
    bottleneck: Lane = Lane.COMPUTE  # the lane that has the most to do
    # expected device memory for weights, gradients on their way to the host and activations
    device_bytes: int = 0
    # the policy for each unit's activations, by the unit's name; used if the policy was left to the planner
    policies: Mapping[str, Policy] = field(default_factory=dict)

    @property
    def window(self) -> tuple[object, ...]:
        """The choices that decide where units are placed."""
        return self.k, self.on_device, self.visiting


def place_in_arena(sizes: Sequence[int], window: int) -> tuple[list[int], int]:
    """Return offsets such that any `window` consecutive pieces do not overlap, and the size of the arena.

    The last pieces and the first ones do not overlap either, if that takes no more memory: the first unit follows the
    last if it is also the head (tied embeddings), and in inference. The arena is at most `window` times the largest.
    """
    slot = max(sizes, default=0)
    in_slots = [index % window * slot for index in range(len(sizes))]
    placements = [
        _first_fit(sizes, window, cyclic=True),
        _first_fit(sizes, window, cyclic=False),
        # Unlucky sizes can leave holes, which make the arena larger than slots of equal size.
        (in_slots, window * slot),
    ]
    return min(placements, key=lambda placement: placement[1])


def _first_fit(sizes: Sequence[int], window: int, cyclic: bool) -> tuple[list[int], int]:
    """Place each piece at the lowest offset at which it overlaps none of its neighbors that have a place already."""
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        neighbors = {*range(max(0, index - window + 1), index)}
        if cyclic:
            neighbors.update(range(min(index, index + window - len(sizes))))
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in neighbors)
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets.append(offset)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    return offsets, max(ends, default=0)


_DEFAULT_SLOTS = 2  # one computes, one arrives


class DeviceLayout:
    """One layout of the device's memory, which units share."""

    def __init__(self, division: Division, window: WindowPlan, staging_buffers: int) -> None:
        self.window = window
        # units that stay on the device, with their gradients and optimizer state
        self.units_on_device = [unit for unit in division.all_units() if unit.name in window.on_device]
        # all units that do not stream: these, and the resident one
        self.staying_units = {*self.units_on_device, division.resident}
        streamed_bytes = [sent_bytes(unit.weights) for unit in division.units if unit not in self.staying_units]
        # the offset in the arena of each unit that streams, and the size of the arena
        self.offsets, self.arena_bytes = place_in_arena(streamed_bytes, window.k)
        resident_bytes = 0 if division.resident in self.units_on_device else sent_bytes(division.resident.weights)
        leaving = [unit for unit in division.all_units() if unit not in self.units_on_device]
        # device memory for weights, and for gradients and optimizer state of units that stay on the device
        self.device_bytes = self.arena_bytes + resident_bytes + window.on_device_bytes
        # this memory, and that for gradients on their way to the host
        largest = max((gradient_bytes(unit.weights) for unit in leaving), default=0)
        self.streaming_bytes = self.device_bytes + staging_buffers * largest


def choose_device_layout(
    division: Division,
    options: PipelineOptions,
    plan: WindowPlan | None,
    first_plan: WindowPlan | None,
    budget: int | None,
    staging_buffers: int,
) -> DeviceLayout:
    """Choose the planner's layout if it fits; else the usual small one; else the smallest, or raise.

    In the smallest, the units that stay on the device in the `first_plan` do so: the host has no room for their state.

    The planner's layout does not fit if weights are sent in another dtype than when the plan was made.
    """
    slots = options.slots
    windows = [] if plan is None else [plan]
    first = first_plan or WindowPlan(_DEFAULT_SLOTS)
    windows.append(replace(first, k=_DEFAULT_SLOTS if slots == "auto" else slots))
    if slots == "auto":
        windows.append(replace(first, k=1))
    layouts = [DeviceLayout(division, window, staging_buffers) for window in windows]
    for layout in layouts:
        if budget is None or layout.streaming_bytes <= budget:
            return layout
    smallest = layouts[-1]
    least = DeviceLayout(division, replace(first, k=1), staging_buffers).streaming_bytes
    raise ValueError(
        f"`memory_budget={options.memory_budget!r}` is too small with "
        f"`k={smallest.window.k * options.k_prime}`. Weights, and gradients on their way to CPU memory, need "
        f"{readable_bytes(smallest.streaming_bytes)}. Set at least {least} bytes ({readable_bytes(least)}), "
        f"with k={options.k_prime}. A whole number counts bytes. Text has a unit, such as '20GB'."
    )


def sent_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights in the dtypes in which they are sent to the device."""
    return lay_out([weight.compute_bytes for weight in weights])[1]


def room_for_gradients(units: Sequence[Unit], present: int, some_may_wait: bool) -> float:
    """Return the host memory that gradients may take; infinite if all of them fit.

    `present` bytes for gradients and copies are allocated already.

    Raises:
        ValueError: The host has no memory for copies of weights, and masters that leave the device; or for gradients,
            unless `some_may_wait` on the device.
    """
    weights = [weight for unit in units for weight in unit.weights]
    user_gradients = [weight.master.grad for weight in weights if weight.master.grad is not None]
    user_bytes = sum(gradient.nbytes for gradient in user_gradients if gradient.layout is torch.strided)
    coming = max(0, sum(gradient_bytes(unit.weights) for unit in units) - user_bytes)
    # A unit exists twice while it moves to its memory, unless it has that already.
    moving = max((sent_bytes(unit.weights) for unit in units if not unit.segments), default=0)
    copies = sum(weight.compute_bytes for weight in weights if weight.lowered)
    masters = sum(weight.nbytes for weight in weights if weight.master.device.type != "cpu")
    free = available_host_memory()
    if free is None or max(0, coming + copies - present) + moving + masters <= free:
        return math.inf
    if some_may_wait:
        coming = 0
    needed = max(0, coming + copies - present) + moving + masters
    if needed > max(0, free):
        raise ValueError(
            f"CPU memory is too small: {readable_bytes(needed)} are needed on top of the model "
            f"({readable_bytes(coming)} for gradients, the rest for copies of weights; optimizer "
            f"state is not counted), but only {readable_bytes(free)} are free. Use a machine "
            "with more memory, or freeze weights."
        )
    return max(0, free + present - copies - moving - masters)
