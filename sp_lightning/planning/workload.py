"""The work of a step, the speeds of a machine, and what can be chosen, as plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from sp_lightning.pipeline.activations.ways import Way

Stepping: TypeAlias = Literal["in backward", "under forward", "after backward"]
"""When units are stepped: as soon as their gradients have landed, to be sent again at once or from the next forward on,
or when all gradients have landed (clipping, a loss scaler)."""


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit in a step."""

    name: str
    weight_bytes: int  # sent to the device; 0 if it lives there
    gradient_bytes: int = 0  # sent back; 0 for a frozen unit
    step_bytes: int = 0  # of host memory that its optimizer step reads and writes
    forward_seconds: float = 0.0  # on the device, with what is computed between it and the next unit
    backward_seconds: float = 0.0  # on the device, without recomputing
    ways: tuple[Way, ...] = (Way("keep", held=0, working=0, seconds=0.0),)  # for its activations, by preference
    bytes_on_device: int = 0  # with gradients and optimizer state, if it lives there; 0 if it may not
    host_bytes: int = 0  # for weights, the copies that are sent, gradients and optimizer state
    resent_bytes: int | None = None  # after a step, if weights that are not stepped still lie there; None for all

    @property
    def bytes_after_step(self) -> int:
        """Bytes sent to the device after a step, if the weights that are not stepped still lie there."""
        return 0 if not self.step_bytes else self.weight_bytes if self.resent_bytes is None else self.resent_bytes


@dataclass(frozen=True)
class Workload:
    """The work of a step of a model, by its units in the order of the forward."""

    units: tuple[UnitWork, ...]
    resident: UnitWork = UnitWork("resident", 0)  # what is never streamed, as if it were one unit; it computes nothing
    trains: bool = True  # whether there is a backward
    stepping: Stepping | None = "in backward"  # None in inference, or with everything frozen
    micro_steps: int = 1  # forwards and backwards for each step of the optimizer: gradient accumulation
    add_seconds: float = 0.0  # on the host, for adding up gradients, in each of these but the first
    rest_seconds: float = 0.0  # between the end of a step and the beginning of the next one
    turn_bytes: int = 0  # taken after the last unit, by a head or a loss, and freed when its backward begins
    outside_bytes: int = 0  # saved outside of units elsewhere
    reserve_bytes: int = 0  # of the device that must stay free beside weights, gradients and activations
    on_device_bytes: int = 0  # of the units that live on the device, with gradients and optimizer state

    @property
    def everything(self) -> tuple[UnitWork, ...]:
        """The units, and what is resident."""
        return (*self.units, self.resident)

    def with_on_device(self, there: Collection[int]) -> Workload:
        """Return the work that is left if the units with these numbers live on the device: they only compute."""
        units, nbytes = list(self.units), self.on_device_bytes
        for number in there:
            unit = self.units[number]
            units[number] = UnitWork(unit.name, 0, 0, 0, unit.forward_seconds, unit.backward_seconds, unit.ways)
            nbytes += unit.bytes_on_device
        return replace(self, units=tuple(units), on_device_bytes=nbytes)


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine, in bytes per second."""

    to_device: float
    to_host: float
    host: float  # of optimizer steps, for the host memory that they read and write
    copy_seconds: float = 0.0  # what each copy costs, whatever its size

    def up(self, nbytes: int) -> float:
        """Return the seconds of a copy to the device."""
        return nbytes / self.to_device + self.copy_seconds if nbytes else 0.0

    def down(self, nbytes: int) -> float:
        """Return the seconds of a copy to the host."""
        return nbytes / self.to_host + self.copy_seconds if nbytes else 0.0

    def step(self, units: Iterable[UnitWork]) -> float:
        """Return the seconds of the optimizer's steps of some units."""
        return sum(unit.step_bytes for unit in units) / self.host


@dataclass(frozen=True)
class Choice:
    """Everything that the planner chooses; units are known by their numbers."""

    k: int  # units on the device at once, not counting those in `kept` and `on_device`
    k_prime: int = 1  # units moved together
    kept: tuple[int, ...] = ()  # units that have a place of their own and are never evicted
    ways: tuple[Way, ...] = ()  # what becomes of each unit's activations; if empty, the first of each unit's ways
    on_device: tuple[int, ...] = ()  # units that live on the device with their gradients and optimizer state

    @property
    def slots(self) -> int:
        """How many groups of units that travel together are on the device at once."""
        return max(1, self.k // self.k_prime)
