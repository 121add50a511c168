"""The work of a step, the machine that does it, the choices, and the prediction that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.optimizer.visit import PIECES_AT_ONCE
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS

Stepping: TypeAlias = Literal["in backward", "under forward", "after backward"]
"""The time at which units are updated: as soon as their gradients have landed, to be sent again at once or from the
next forward on, or when all gradients have landed (clipping, a loss scaler)."""


Numbers: TypeAlias = tuple[int, ...]
"""Units, by their numbers in the order of the forward; the resident one has the number after the last one."""


@dataclass(frozen=True)
class Way:
    """One way for a unit to have its activations in backward."""

    policy: Policy
    held: int  # bytes on the device from its forward to its backward
    working: int  # bytes on the device while it computes
    leaving: int = 0  # bytes that go to the host, and come back in backward
    under_way: int = 0  # of these, bytes that are on the device while the next unit computes
    repeating: float = 0.0  # seconds in which its forward runs again


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit in a step."""

    name: str
    weight_bytes: int  # sent to the device
    gradient_bytes: int = 0  # sent back; 0 for a frozen unit
    step_bytes: int = 0  # of host memory that its optimizer step reads and writes
    # on the device, with the computing between it and the next unit
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0  # on the device, without recomputing
    # for its activations, by preference
    ways: tuple[Way, ...] = (Way("keep", held=0, working=0),)
    # device memory with gradients and optimizer state, if it stays there; 0 if it may not
    bytes_on_device: int = 0
    # bytes of the device's memory that its update reads and writes, if it lives there
    update_traffic: int = 0
    # of the device, while it is updated there piece by piece, if it stays there
    piece_bytes: int = 0
    # state, masters and new weights that a visit sends up and down; 0 if it may not visit
    visit_up: int = 0
    visit_down: int = 0
    visit_bytes: int = 0  # of the device, for the pieces of its visit, and for stepping them
    # kernels of a visit, and bytes of the device's memory that they read and write
    visit_kernels: int = 0
    visit_traffic: int = 0
    # host memory for weights, the copies that are sent, and optimizer state; and for the latter alone
    host_bytes: int = 0
    state_bytes: int = 0
    # for sums of gradients, where they are added up: of micro-batches or of several devices
    sum_bytes: int = 0
    # bytes sent to the device after a step, if weights that are not updated are still there
    bytes_after_step: int = 0

    def way(self, policy: Policy) -> Way:
        """Return the way with a policy, or the one that it has instead."""
        return next((way for way in self.ways if way.policy == policy), self.ways[0])


@dataclass(frozen=True)
class Workload:
    """The work of a step of a model, by its units in the order of the forward."""

    units: tuple[UnitWork, ...]
    # the weights that are never streamed, as if they were one unit; it computes nothing
    resident: UnitWork = UnitWork("resident", 0)
    trains: bool = True  # whether there is a backward
    stepping: Stepping | None = "in backward"  # None in inference, or with everything frozen
    # forwards and backwards for each step of the optimizer: gradient accumulation
    micro_steps: int = 1
    add_seconds: float = 0.0  # on the host, for adding up gradients, in each of these but the first
    rest_seconds: float = 0.0  # between the end of a step and the beginning of the next one
    # bytes taken after the last unit, by a head or a loss, and freed when its backward begins
    turn_bytes: int = 0
    # bytes saved outside of units elsewhere; or all bytes that were taken, if activations are not chosen
    outside_bytes: int = 0
    # whether the host adds up gradients as they come: of micro-batches or of several devices
    adds_up: bool = False
    # that gradients on their way to the host take on the device
    staging_buffers: int = STAGING_BUFFERS
    # whether gradients may wait on the device until they are used, where the host has no room for them
    may_wait: bool = False
    # whether units may stay on the device from the first step on, where the host has no room for their state
    may_stay: bool = False
    # whether a drive takes the optimizer state that the host has no room for
    has_drive: bool = False
    # the units that stay on the device from the first step on; None if the first steps are yet to be planned
    staying: Numbers | None = None

    @cached_property
    def everything(self) -> tuple[UnitWork, ...]:
        """The units, and the resident one."""
        return (*self.units, self.resident)

    @cached_property
    def able_to_live(self) -> Numbers:
        """The units that may stay on the device, in the order in which they come there: the resident one first."""
        in_order = (len(self.units), *range(len(self.units)))
        return tuple(number for number in in_order if self.everything[number].bytes_on_device)

    @property
    def gradients_stay(self) -> bool:
        """Whether gradients of units that visit stay on the device; if they are added up, they are on the host."""
        return self.micro_steps == 1

    def numbered(self, numbers: Iterable[int]) -> list[UnitWork]:
        """Return the units with these numbers; the resident one has the number after the last one."""
        return [self.everything[number] for number in numbers]

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the units with these numbers."""
        return tuple(unit.name for unit in self.numbered(numbers))

    def kept_on_host(self, choice: Choice) -> dict[int, UnitWork]:
        """Return the units whose optimizer state is on the host, by number: all that do not stay on the device."""
        living = set(choice.living)
        return {number: unit for number, unit in enumerate(self.everything) if number not in living}

    def ways(self, choice: Choice) -> Sequence[Way]:
        """Return the way of each unit's activations."""
        return choice.ways or [unit.ways[0] for unit in self.units]

    def gradients_to_host(self, choice: Choice) -> list[int]:
        """Return the bytes of each unit's gradients that backward sends; the resident unit is last."""
        staying = {*choice.living, *choice.waiting, *(choice.visiting if self.gradients_stay else ())}
        units = enumerate(self.everything)
        return [0 if number in staying else unit.gradient_bytes for number, unit in units]

    def traffic_of_gradients(self, choice: Choice) -> int:
        """Return the bytes of the device's memory that norms read, and that adding to gradients that wait moves."""
        nbytes = sum(unit.gradient_bytes for unit in self.everything) if self.stepping == "after backward" else 0
        if self.micro_steps > 1:
            waiting = self.numbered(choice.waiting)
            nbytes += sum(2 * unit.sum_bytes + unit.gradient_bytes for unit in waiting)
        return nbytes

    def bytes_that_wait(self, number: int) -> int:
        """Return the bytes of a unit's gradients if these wait on the device."""
        unit = self.everything[number]
        return unit.gradient_bytes if self.gradients_stay else unit.sum_bytes


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine, in bytes per second."""

    to_device: float
    to_host: float
    host: float  # of optimizer steps, for the host memory that they read and write
    both: float = math.inf  # of copies up and down together
    host_memory: float = math.inf  # of host memory, which copies and the host's steps share
    # of the device's memory, for the bytes of steps there, and the additional seconds of each of their kernels
    device_memory: float = math.inf
    kernel_seconds: float = 0.0
    # of optimizer state that a drive reads, and writes again, with the slower one of both
    drive: float = math.inf
    # the same of updates of units that stream, with all waits; 0 until it was recorded
    updates: float = 0.0

    def visit(self, unit: UnitWork, up: int) -> float:
        """Return the seconds of a unit's visit that sends `up` bytes to the device.

        Pieces take turns, so lanes work side by side, limited by the number of buffers: each buffer is taken until its
        piece has come down.
        """
        down = unit.visit_down
        arriving, leaving = up / self.to_device, down / self.to_host
        stepping = unit.visit_kernels * self.kernel_seconds + unit.visit_traffic / self.device_memory
        if self.updates:
            stepping = unit.visit_traffic / self.updates
        shared = (up + down) / min(self.both, self.host_memory)
        return max(arriving, leaving, stepping, shared, (arriving + stepping + leaving) / PIECES_AT_ONCE)


@dataclass(frozen=True)
class Choice:
    """Everything that the planner chooses; units are known by their numbers."""

    k: int  # places for units that stream
    # units that stay on the device with their gradients and optimizer state; see `Workload.everything`
    living: Numbers = ()
    # units that are updated on the device, and whose state is copied there for that
    visiting: Numbers = ()
    # the way of each unit's activations; if empty, the first of each unit's ways
    ways: tuple[Way, ...] = ()
    # units whose gradients wait on the device until these units are updated
    waiting: Numbers = ()
    # units whose optimizer state lies on a drive, through which the host steps them
    on_drive: Numbers = ()
    # whether units visit only as the next forward loads them, though their gradients are final in backward
    defers_visits: bool = False


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step of the optimizer, in the steady state."""

    choice: Choice
    seconds: float
    lanes: dict[Lane, float]  # seconds of work in each
    device_bytes: int  # peak of weights, gradients on their way and activations
    host_bytes: int  # for weights, gradients, optimizer state and offloaded activations
    bytes_to_device: int
    bytes_to_host: int
    bytes_to_drive: int = 0  # of optimizer state, which was read before

    @property
    def bottleneck(self) -> Lane:
        """The lane that is busy for the longest time."""
        return max(self.lanes, key=self.lanes.__getitem__)
