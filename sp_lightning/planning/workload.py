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
    """The work of one unit in a step.

    Args:
        name: Its name.
        weight_bytes: Bytes sent to the device; 0 if it lives there.
        gradient_bytes: Bytes of gradients that come back; 0 for a frozen unit.
        step_bytes: Bytes of host memory that its optimizer step reads and writes.
        forward_seconds: Time of its forward on the device, with what is computed between it and the next unit.
        backward_seconds: Time of its backward on the device, without recomputing.
        ways: What may become of its activations, in order of preference.
        bytes_on_device: Device memory with gradients and optimizer state, if it lives there; 0 if it may not.
        host_bytes: Host memory for weights, the copies that are sent, gradients and optimizer state.
        resent_bytes: Bytes sent after a step, if the weights that are not stepped still lie there; None for all.
    """

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
    """The work of a step of a model.

    Args:
        units: The units that may stream, in the order of the forward.
        resident: Everything that is never streamed, as if it were one unit; it computes nothing.
        trains: Whether there is a backward.
        stepping: When the optimizer steps units; None if it does not, in inference or with everything frozen.
        micro_steps: Forwards and backwards for each step of the optimizer: gradient accumulation.
        add_seconds: Time on the host for adding up gradients, in each of these but the first.
        rest_seconds: Time between the end of a step and the beginning of the next one.
        turn_bytes: Memory taken after the last unit, by a head or a loss, and freed when its backward begins.
        outside_bytes: Bytes that are otherwise saved outside of units.
        reserve_bytes: Device memory that must stay free beside weights, gradients and activations.
        on_device_bytes: Memory of the units that live on the device, with gradients and optimizer state.
    """

    units: tuple[UnitWork, ...]
    resident: UnitWork = UnitWork("resident", 0)
    trains: bool = True
    stepping: Stepping | None = "in backward"
    micro_steps: int = 1
    add_seconds: float = 0.0
    rest_seconds: float = 0.0
    turn_bytes: int = 0
    outside_bytes: int = 0
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
    """The speeds of a machine, in bytes per second.

    Args:
        to_device: Of copies to the device.
        to_host: Of copies to the host.
        host: Of optimizer steps, for the host memory that they read and write.
        copy_seconds: The constant cost of a copy, independent of its size.
    """

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
    """Everything that the planner chooses.

    Args:
        k: Units on the device at once, not counting those in `kept` and `on_device`.
        k_prime: Units moved together.
        kept: Numbers of the units that have a place of their own and are never evicted.
        ways: For each unit, what becomes of its activations; if empty, the first of each unit's ways.
        on_device: Numbers of the units that live on the device with their gradients and optimizer state.
    """

    k: int
    k_prime: int = 1
    kept: tuple[int, ...] = ()
    ways: tuple[Way, ...] = ()
    on_device: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """How many groups of units that travel together are on the device at once."""
        return max(1, self.k // self.k_prime)
