"""What a step has to do, and what with: numbers alone, measured (measure.py) or taken from a model's shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeAlias

from sp_lightning.pipeline.activations.choice import Way

Stepping: TypeAlias = Literal["in backward", "under forward", "apart"]
"""When the optimizer steps units: as soon as their gradients have landed, under the next forward, or on its own."""

_MOST_CALLS = 4  # for each unit, on average

NOTHING_SAVED = Way("keep", held=0, working=0, seconds=0.0)


@dataclass(frozen=True)
class UnitWork:
    """What one unit has to do in a step.

    Args:
        name: Its name.
        weight_bytes: What is sent to the device.
        gradient_bytes: What comes back; 0 for a frozen unit.
        parameters: How many numbers the optimizer steps.
        forward_seconds: On the device.
        backward_seconds: On the device, without a second forward.
        host_bytes: What it takes on the host: weights, what is sent of them, gradients, optimizer state.
        ways: What may become of its activations, in order of preference.
        bytes_on_device: What it takes on the device with gradients and optimizer state; 0 if it may not live there.
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

    @property
    def lives_on_device(self) -> bool:
        """Whether nothing of it travels (see `Workload.with_on_device`)."""
        return self.weight_bytes == 0


@dataclass(frozen=True)
class Workload:
    """What a step of a model has to do.

    Args:
        units: The units that may stream, in the order of the forward.
        resident: All that is never streamed, as if it were one unit; it computes nothing.
        trains: Whether there is a backward.
        stepping: When the optimizer steps units; None if it does not, in inference or with everything frozen.
        micro_steps: Forwards and backwards for each step of the optimizer; gradients add up.
        clips: Whether a unit may be stepped only when all gradients have landed: clipping by norm, a loss scaler.
        turn_seconds: What the device computes between the last unit's forward and its backward: a head, a loss.
        rest_seconds: What passes between the end of a step and the beginning of the next one.
        turn_bytes: What is taken after the last unit, by a head or a loss: gone when its backward begins.
        outside_bytes: Activations that are saved outside of units besides.
        piece_bytes: Device memory in which a unit's gradients are put together, if that is more than the gradients.
        reserve_bytes: Device memory that must stay free beside weights, gradients and activations.
        on_device_bytes: What units take that live on the device, with gradients and optimizer state.
        calls: Which units are called, by their numbers, in the order of the forward. Nothing, if it is each of them
            once, one after the other.
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
    piece_bytes: int = 0
    reserve_bytes: int = 0
    on_device_bytes: int = 0
    calls: tuple[int, ...] = ()

    @property
    def order(self) -> Sequence[int]:
        """Units in the order in which they are called; a head that has its weight from an embedding is in its unit."""
        return self.calls or range(len(self.units))

    def with_on_device(self, units: Collection[int]) -> Workload:
        """What is left to do if these units live on the device: they compute, and nothing of them travels."""
        there = [
            replace(unit, weight_bytes=0, gradient_bytes=0, parameters=0, host_bytes=0, bytes_on_device=0)
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
    """How fast things are.

    Args:
        to_device: Bytes per second.
        to_host: Bytes per second.
        optimizer: Parameters that are stepped on the host per second.
        copy_seconds: What a copy takes whatever its size.
    """

    to_device: float
    to_host: float
    optimizer: float
    copy_seconds: float = 0.0


def calls_in_order(seen: Iterable[int | None], units: int) -> tuple[int, ...]:
    """`Workload.calls` by what was seen.

    Args:
        seen: Whose calls these were, one after the other; None is nobody's.
        units: How many units there are.

    Returns:
        Nothing where not all were called, or so often (a loop over tokens) that to replay it would take too long.
    """
    calls = tuple(unit for unit, _ in groupby(unit for unit in seen if unit is not None))
    is_whole = set(calls) == {*range(units)} and len(calls) <= _MOST_CALLS * units
    return calls if is_whole and calls != (*range(units),) else ()
