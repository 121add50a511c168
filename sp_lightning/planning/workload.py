"""The work of a step and the speeds of a machine as plain numbers: measured (measure.py) or estimated (estimate.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeAlias

from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.gradients.buffers import STAGING_BUFFERS

Stepping: TypeAlias = Literal["in backward", "under forward", "apart"]
"""When the optimizer steps units: as soon as their gradients have landed, during the next forward, or while the device
waits."""

_MOST_CALLS = 4  # per unit, on average; more take too long to replay

NOTHING_SAVED = Way("keep", held=0, working=0, seconds=0.0)


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit in a step.

    Args:
        name: Its name.
        weight_bytes: Bytes sent to the device.
        gradient_bytes: Bytes of gradients that come back; 0 for a frozen unit.
        parameters: Number of parameter elements that the optimizer steps.
        forward_seconds: Time of its forward on the device.
        backward_seconds: Time of its backward on the device, without recomputing.
        host_bytes: Host memory for weights, the copies that are sent, gradients and optimizer state.
        ways: What may become of its activations, in order of preference.
        bytes_on_device: Device memory with gradients and optimizer state, if it lives there; 0 if it may not.
        sections: Number of sections that its gradients, its step and its weights are divided into.
        stepped_bytes: Bytes sent to the device after a step, if the other weights still lie there; None for all.
    """

    name: str
    weight_bytes: int
    gradient_bytes: int = 0
    parameters: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    host_bytes: int = 0
    ways: tuple[Way, ...] = (NOTHING_SAVED,)
    bytes_on_device: int = 0
    sections: int = 1
    stepped_bytes: int | None = None

    @property
    def bytes_after_step(self) -> int:
        """Bytes sent to the device after a step, if the weights that are not stepped still lie there."""
        return self.weight_bytes if self.stepped_bytes is None else self.stepped_bytes

    @property
    def lives_on_device(self) -> bool:
        """Whether nothing of it is copied (see `Workload.with_on_device`)."""
        return self.weight_bytes == 0


@dataclass(frozen=True)
class Workload:
    """The work of a step of a model.

    Args:
        units: The units that may stream, in the order of the forward.
        resident: Everything that is never streamed, as if it were one unit; it computes nothing.
        trains: Whether there is a backward.
        stepping: When the optimizer steps units; None if it does not, in inference or with everything frozen.
        micro_steps: Forwards and backwards for each step of the optimizer: gradient accumulation.
        clips: Whether a unit may be stepped only when all gradients have landed: clipping by norm, a loss scaler.
        turn_seconds: Time on the device between the last unit's forward and its backward: a head, a loss.
        rest_seconds: Time between the end of a step and the beginning of the next one.
        turn_bytes: Memory taken after the last unit, by a head or a loss, and freed when its backward begins.
        outside_bytes: Bytes that are otherwise saved outside of units.
        staging_bytes: Device memory in which a unit's gradients are put together, if that is more than the gradients.
        staging_buffers: How many units' gradients have such memory.
        reserve_bytes: Device memory that must stay free beside weights, gradients and activations.
        on_device_bytes: Memory of the units that live on the device, with gradients and optimizer state.
        calls: Numbers of the units that forward calls, in order. Empty if it calls each of them once, one after the
            other.
    """

    units: tuple[UnitWork, ...]
    resident: UnitWork = UnitWork("resident", 0)
    trains: bool = True
    stepping: Stepping | None = "in backward"
    micro_steps: int = 1
    clips: bool = False
    turn_seconds: float = 0.0
    rest_seconds: float = 0.0
    turn_bytes: int = 0
    outside_bytes: int = 0
    staging_bytes: int = 0
    staging_buffers: int = STAGING_BUFFERS
    reserve_bytes: int = 0
    on_device_bytes: int = 0
    calls: tuple[int, ...] = ()

    @property
    def order(self) -> Sequence[int]:
        """Numbers of the units in the order of their calls; a head tied to an embedding belongs to its unit."""
        return self.calls or range(len(self.units))

    def with_on_device(self, units: Collection[int]) -> Workload:
        """Return the work that is left if these units live on the device: they compute, but nothing is copied."""
        there = [
            replace(
                unit,
                weight_bytes=0,
                gradient_bytes=0,
                parameters=0,
                host_bytes=0,
                bytes_on_device=0,
                stepped_bytes=None,
            )
            if number in units
            else unit
            for number, unit in enumerate(self.units)
        ]
        return replace(
            self,
            units=tuple(there),
            on_device_bytes=self.on_device_bytes + sum(self.units[unit].bytes_on_device for unit in units),
        )


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine.

    Args:
        to_device: Bytes per second that copies to the device reach.
        to_host: Bytes per second that copies to the host reach.
        optimizer: Parameter elements that are stepped on the host per second.
        copy_seconds: The constant cost of a copy, independent of its size.
    """

    to_device: float
    to_host: float
    optimizer: float
    copy_seconds: float = 0.0


def calls_in_order(seen: Iterable[int | None], units: int) -> tuple[int, ...]:
    """Return `Workload.calls` for observed calls.

    Args:
        seen: Number of the unit of each call, in order; None for a call that belongs to none.
        units: Number of units.

    Returns:
        The calls; empty if each unit was called once in order, if some were not called at all, or if there were so many
        calls (a loop over tokens) that replaying them would take too long.
    """
    calls = tuple(unit for unit, _ in groupby(unit for unit in seen if unit is not None))
    is_whole = set(calls) == {*range(units)} and len(calls) <= _MOST_CALLS * units
    return calls if is_whole and calls != (*range(units),) else ()
