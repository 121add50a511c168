"""The cost of a step for a given choice: its time, lane by lane, and its memory (docs/planning.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sp_lightning.pipeline.activations.ways import Way, peak
from sp_lightning.pipeline.transfer.trace import Lane
from sp_lightning.pipeline.weights.device import place_in_arena, travel_together
from sp_lightning.planning.replay import Layout, Replay
from sp_lightning.planning.workload import Machine, Workload

_WARM_UP = 1  # steps until the replay repeats itself


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


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step of the optimizer.

    Attributes:
        seconds: Its time, in the steady state.
        lanes: Seconds of work in each lane.
        device_bytes: Peak device memory for weights, gradients on their way and activations.
        host_bytes: Host memory for weights, gradients, optimizer state and offloaded activations.
        bytes_to_device: Bytes copied to the device.
        bytes_to_host: Bytes copied to the host.
    """

    seconds: float
    lanes: dict[Lane, float]
    device_bytes: int
    host_bytes: int
    bytes_to_device: int
    bytes_to_host: int

    @property
    def bottleneck(self) -> Lane:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step takes with a choice."""
    workload = workload.with_on_device(choice.on_device)
    replay = Replay(workload, machine, ways_of(workload, choice), _layout(workload, choice))
    for _ in range(_WARM_UP * workload.micro_steps):
        replay.step()
    begin, lanes, moved = replay.compute, dict(replay.busy), (replay.bytes_to_device, replay.bytes_to_host)
    for _ in range(workload.micro_steps):
        replay.step()
    return Prediction(
        seconds=replay.compute - begin,
        lanes={lane: seconds - lanes[lane] for lane, seconds in replay.busy.items()},
        device_bytes=device_bytes(workload, choice),
        host_bytes=host_bytes(workload, choice),
        bytes_to_device=replay.bytes_to_device - moved[0],
        bytes_to_host=replay.bytes_to_host - moved[1],
    )


def least_seconds(workload: Workload, machine: Machine, ways: Sequence[Way]) -> float:
    """Return a lower bound for a step's time with these ways and any window: the work of the busiest lane."""
    everything = (*workload.units, workload.resident)
    second = sum(way.repeating for way in ways)
    compute = sum(unit.forward_seconds + workload.trains * unit.backward_seconds for unit in workload.units)
    between = workload.rest_seconds + workload.trains * (workload.turn_seconds + second)
    to_device = sum(unit.bytes_after_step for unit in everything if unit.parameters) if workload.stepping else 0
    to_host = sum(unit.gradient_bytes for unit in everything) * workload.micro_steps
    stepped = sum(unit.parameters for unit in everything) if workload.stepping else 0
    return max(
        (compute + between) * workload.micro_steps,
        to_device / machine.to_device,
        to_host / machine.to_host,
        stepped / machine.optimizer,
    )


def device_bytes(workload: Workload, choice: Choice) -> int:
    """Return the peak device memory for weights, gradients on their way and activations."""
    return (
        weight_bytes(workload, choice)
        + gradient_bytes(workload)
        + activation_bytes(workload, ways_of(workload, choice))
    )


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, and for everything that belongs to units which live on the device."""
    own = sum(workload.units[unit].weight_bytes for unit in choice.kept) + workload.resident.weight_bytes
    return own + _layout(workload, choice).arena_bytes + workload.on_device_bytes


def gradient_bytes(workload: Workload) -> int:
    """Return the device memory for gradients on their way to the host."""
    largest = max(unit.gradient_bytes for unit in (*workload.units, workload.resident))
    return workload.staging_buffers * max(workload.staging_bytes, largest)


def activation_bytes(workload: Workload, ways: Sequence[Way]) -> int:
    """Return the peak device memory for saved tensors, and for what units and the turn take while they compute."""
    return peak(ways, workload.turn_bytes) + workload.outside_bytes if workload.trains else 0


def host_bytes(workload: Workload, choice: Choice) -> int:
    """Return the host memory for weights, gradients, optimizer state and offloaded activations."""
    waiting = sum(way.leaving for way in ways_of(workload, choice))
    return waiting + sum(unit.host_bytes for unit in (*workload.units, workload.resident))


def ways_of(workload: Workload, choice: Choice) -> tuple[Way, ...]:
    """Return, for each unit, what becomes of its activations."""
    return choice.ways or tuple(unit.ways[0] for unit in workload.units)


def _layout(workload: Workload, choice: Choice) -> Layout:
    apart = {*choice.kept, *(number for number, unit in enumerate(workload.units) if unit.lives_on_device)}
    parts = travel_together(len(workload.units), choice.k_prime, apart)
    streamed = [part for part in parts if part[0] not in apart]
    sizes = tuple(sum(workload.units[unit].weight_bytes for unit in part) for part in streamed)
    offsets, arena_bytes = _arena(sizes, max(1, choice.k // choice.k_prime))
    return Layout(parts, streamed, offsets, arena_bytes)


@lru_cache(maxsize=1024)  # the same window is tried with many ways for activations
def _arena(sizes: tuple[int, ...], window: int) -> tuple[list[int], int]:
    return place_in_arena(sizes, window)
