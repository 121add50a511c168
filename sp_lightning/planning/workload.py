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
    weight_bytes: int
    gradient_bytes: int = 0
    step_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    ways: tuple[Way, ...] = (Way("keep", held=0, working=0, seconds=0.0),)
    bytes_on_device: int = 0
    host_bytes: int = 0
    resent_bytes: int | None = None

    @property
    def bytes_after_step(self) -> int:
        """Bytes sent to the device after a step, if the weights that are not stepped still lie there."""
        return 0 if not self.step_bytes else self.weight_bytes if self.resent_bytes is None else self.resent_bytes


@dataclass(frozen=True)
class Workload:
    """The work of a step of a model."""

    units: tuple[UnitWork, ...]
    resident: UnitWork = UnitWork("resident", 0)
    trains: bool = True
    stepping: Stepping | None = "in backward"
    micro_steps: int = 1
    add_seconds: float = 0.0
    rest_seconds: float = 0.0
    turn_bytes: int = 0
    outside_bytes: int = 0
    staging_buffers: int = 2
    reserve_bytes: int = 0
    on_device_bytes: int = 0

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
    host: float
    copy_seconds: float = 0.0

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
    """Everything that the planner chooses."""

    k: int
    k_prime: int = 1
    kept: tuple[int, ...] = ()
    ways: tuple[Way, ...] = ()
    on_device: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """How many groups of units that travel together are on the device at once."""
        return max(1, self.k // self.k_prime)
