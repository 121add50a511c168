"""The work of a step, a machine that does it, what can be chosen, and what is predicted of that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.options import Policy

# units before the turn for which sending activations gains nothing: backward needs them at once
UNITS_THAT_STAY = 1

Stepping: TypeAlias = Literal["in backward", "under forward", "after backward"]
"""When units are stepped: as soon as their gradients have landed, to be sent again at once or from the next forward on,
or when all gradients have landed (clipping, a loss scaler)."""


@dataclass(frozen=True)
class Way:
    """One way for a unit to have its activations in backward."""

    policy: Policy
    held: int  # bytes on the device from its forward to its backward
    working: int  # bytes on the device while it computes
    seconds: float  # that it costs
    leaving: int = 0  # bytes that go to the host, and come back in backward
    under_way: int = 0  # of these, bytes that are on the device while the next unit computes
    repeating: float = 0.0  # the part of the time in which its forward runs again


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit in a step."""

    name: str
    weight_bytes: int  # sent to the device; 0 if it lives there
    gradient_bytes: int = 0  # sent back; 0 for a frozen unit
    step_bytes: int = 0  # of host memory that its optimizer step reads and writes
    # on the device, with what is computed between it and the next unit
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0  # on the device, without recomputing
    # for its activations, by preference
    ways: tuple[Way, ...] = (Way("keep", held=0, working=0, seconds=0.0),)
    # with gradients and optimizer state, if it lives there; 0 if it may not
    bytes_on_device: int = 0
    # state, masters and new weights that a visit sends up and down; 0 if it may not visit
    visit_up: int = 0
    visit_down: int = 0
    visit_bytes: int = 0  # of the device, for the pieces of its visit, and for stepping them
    # for weights, the copies that are sent, optimizer state, and sums of several devices' gradients
    host_bytes: int = 0
    # sent to the device after a step, if weights that are not stepped still lie there
    bytes_after_step: int = 0


@dataclass(frozen=True)
class Workload:
    """The work of a step of a model, by its units in the order of the forward."""

    units: tuple[UnitWork, ...]
    # what is never streamed, as if it were one unit; it computes nothing
    resident: UnitWork = UnitWork("resident", 0)
    trains: bool = True  # whether there is a backward
    stepping: Stepping | None = "in backward"  # None in inference, or with everything frozen
    # forwards and backwards for each step of the optimizer: gradient accumulation
    micro_steps: int = 1
    add_seconds: float = 0.0  # on the host, for adding up gradients, in each of these but the first
    rest_seconds: float = 0.0  # between the end of a step and the beginning of the next one
    # taken after the last unit, by a head or a loss, and freed when its backward begins
    turn_bytes: int = 0
    outside_bytes: int = 0  # saved outside of units elsewhere
    # of the device that must stay free beside weights, gradients and activations
    reserve_bytes: int = 0
    # whether either everything lives on the device or nothing: the optimizer looks at weights together
    lives_whole: bool = False
    # of units that live on the device, with gradients and optimizer state, and for visits
    on_device_bytes: int = 0
    on_device_step_bytes: int = 0  # which the steps of those that live there read and write
    # whether several devices add their gradients up on the host, as they come
    adds_up: bool = False

    @property
    def everything(self) -> tuple[UnitWork, ...]:
        """The units, and what is resident."""
        return (*self.units, self.resident)

    @property
    def gradients_stay(self) -> bool:
        """Whether gradients of units that visit stay on the device; if they are added up, they are on the host."""
        return self.micro_steps == 1

    def placed(self, choice: Choice) -> Workload:
        """Return the work that is left with units that live on the device; of the others, the chosen ones can visit.

        A unit that lives there only computes.
        """
        units = list(self.everything)
        living = [units[number] for number in choice.on_device]
        for number, unit in zip(choice.on_device, living, strict=True):
            units[number] = UnitWork(
                unit.name,
                weight_bytes=0,
                forward_seconds=unit.forward_seconds,
                backward_seconds=unit.backward_seconds,
                ways=unit.ways,
            )
        for number, unit in enumerate(units):
            if unit.visit_up and number not in choice.visiting:
                units[number] = replace(unit, visit_up=0, visit_down=0, visit_bytes=0)
        gradients = sum(unit.gradient_bytes for unit in self.everything)
        left = sum(unit.gradient_bytes for unit in units)
        return replace(
            self,
            units=tuple(units[:-1]),
            resident=units[-1],
            add_seconds=self.add_seconds * left / max(1, gradients),
            on_device_bytes=sum(unit.bytes_on_device for unit in living) + max(unit.visit_bytes for unit in units),
            on_device_step_bytes=sum(unit.step_bytes for unit in living),
        )


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine, in bytes per second."""

    to_device: float
    to_host: float
    host: float  # of optimizer steps, for the host memory that they read and write
    copy_seconds: float = 0.0  # what each copy costs, whatever its size
    both: float = math.inf  # of copies up and down together
    device: float = math.inf  # of optimizer steps on the device, for the same bytes as on the host
    host_memory: float = math.inf  # which copies and the host's steps share

    def up(self, nbytes: int) -> float:
        """Return the seconds of a copy to the device."""
        return nbytes / self.to_device + self.copy_seconds if nbytes else 0.0

    def down(self, nbytes: int) -> float:
        """Return the seconds of a copy to the host."""
        return nbytes / self.to_host + self.copy_seconds if nbytes else 0.0

    def step(self, unit: UnitWork) -> float:
        """Return the seconds of the optimizer's step of a unit on the host."""
        return unit.step_bytes / self.host

    def visit(self, up: int, down: int) -> float:
        """Return the seconds of a visit that sends so many bytes: of its lanes the busiest, which pieces keep busy.

        Two pieces take turns, so each of them may go up, be stepped and come down while the other one does.
        """
        stepping = (up + down) / self.device
        one_way = self.up(up), self.down(down)
        together = (up + down) / min(self.both, self.host_memory)
        return max(*one_way, stepping, together, (sum(one_way) + stepping) / 2)


@dataclass(frozen=True)
class Choice:
    """Everything that the planner chooses; units are known by their numbers."""

    k: int  # units on the device at once, not counting those in `kept` and `on_device`
    k_prime: int = 1  # units moved together
    kept: tuple[int, ...] = ()  # units that have a place of their own and are never evicted
    # what becomes of each unit's activations; if empty, the first of each unit's ways
    ways: tuple[Way, ...] = ()
    # units that live on the device with their gradients and optimizer state; see `Workload.everything`
    on_device: tuple[int, ...] = ()
    # units that are stepped on the device, where their state comes for that
    visiting: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """How many units, joined as they travel, are on the device at once."""
        return max(1, self.k // self.k_prime)


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

    @property
    def bottleneck(self) -> Lane:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])
