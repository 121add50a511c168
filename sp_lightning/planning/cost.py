"""The work of a step, and what it costs with a given choice: its time, in closed form, and its memory.

[Note: the time of a step]
Computing, copies in both directions and work on the host go on side by side, so a step takes about as long as the
busiest of these lanes. Three things keep work from being put off until its lane has time:

    forward, backward   What belongs to one cannot be done in the other: weights are sent for both, activations leave in
                        forward and come back in backward, gradients leave in backward. Each takes as long as its own
                        busiest lane; with a single slot, computing and copies of weights take turns.
    the turn            From backward to the next forward: the first unit's gradients leave last, are stepped, and come
                        back as weights before anything is computed. Others that were stepped where they lie are sent
                        before those, unless the end of backward has left time for it.
    the host            It begins when the last unit's gradients have landed, steps all units, and is done before the
                        last one's next forward.

[Note: loads]
Of N groups of units, of which k fit into the window, the last k stay there for backward, and the first k after it:
N - k are sent in backward, and N - k in forward. After a step, what stayed is sent again, as are units that are kept.
In inference the first ones do not stay: all are sent, but for those that share their place with no other.

[Note: the peak]
From its forward to its backward a unit holds something: all that it saved, or its inputs alone, or next to nothing if
these wait on the host. While it computes, in forward and in backward, it takes more. Meanwhile the units before it hold
theirs, and those after it hold nothing yet, or nothing any more. What the unit before it saved may still be leaving for
the host, or be coming back already. So the peak is the largest, over all units, of what the units before one hold, what
of the last of them is under way, and what that one needs to compute; or, at the turn from forward to backward, what all
units hold and what is taken after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from sp_lightning.pipeline.gradients.buffers import landing_buffers
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.weights.gradient_layout import STAGING_BUFFERS
from sp_lightning.pipeline.window.places import place_in_arena, travel_together

UNITS_THAT_STAY = 1  # units before the turn for which sending activations gains nothing: backward needs them at once

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
    forward_seconds: float = 0.0  # on the device, with what is computed between it and the next unit
    backward_seconds: float = 0.0  # on the device, without recomputing
    ways: tuple[Way, ...] = (Way("keep", held=0, working=0, seconds=0.0),)  # for its activations, by preference
    bytes_on_device: int = 0  # with gradients and optimizer state, if it lives there; 0 if it may not
    host_bytes: int = 0  # for weights, the copies that are sent, and optimizer state
    bytes_after_step: int = 0  # sent to the device after a step, if weights that are not stepped still lie there


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
    sum_bytes: int = 0  # of the host, in which several devices add gradients up

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


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step takes with a choice."""
    workload = workload.with_on_device(choice.on_device)
    ways = choice.ways or tuple(unit.ways[0] for unit in workload.units)
    step = _Step(workload, machine, choice, ways)
    return Prediction(
        choice,
        seconds=step.seconds(),
        lanes=step.lanes,
        device_bytes=weight_bytes(workload, choice) + gradient_bytes(workload) + activation_bytes(workload, ways),
        host_bytes=sum(way.leaving for way in ways)
        + sum(unit.host_bytes for unit in workload.everything)
        + landing_bytes(workload, choice.k_prime),
        bytes_to_device=step.bytes_to_device,
        bytes_to_host=step.bytes_to_host,
    )


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, and for everything that belongs to units which live on the device."""
    _, streamed, kept = _groups(workload, choice)
    window = _arena_bytes(tuple(group.weight_bytes for group in streamed), choice.slots)
    return window + sum(unit.weight_bytes for unit in (*kept, workload.resident)) + workload.on_device_bytes


def gradient_bytes(workload: Workload) -> int:
    """Return the device memory for gradients on their way to the host."""
    return STAGING_BUFFERS * max(unit.gradient_bytes for unit in workload.everything)


def landing_bytes(workload: Workload, k_prime: int) -> int:
    """Return the host memory for gradients: for few where they are stepped or added as they come, else for all."""
    gradients = sorted((unit.gradient_bytes for unit in workload.everything), reverse=True)
    passing = workload.stepping == "in backward" or workload.sum_bytes > 0
    return workload.sum_bytes + sum(gradients[: landing_buffers(len(gradients), k_prime)] if passing else gradients)


def peak(ways: Sequence[Way], turn: int = 0) -> int:
    """Return the most bytes that are on the device at once, if so many are taken at the turn; see [Note: the peak]."""
    held = most = under_way = 0
    for way in ways:
        most = max(most, held + under_way + way.working)
        held += way.held
        under_way = way.under_way
    return max(most, held + under_way + turn)


def activation_bytes(workload: Workload, ways: Sequence[Way]) -> int:
    """Return the peak device memory for saved tensors, and for what units and the turn take while they compute."""
    return peak(ways, workload.turn_bytes) + workload.outside_bytes if workload.trains else 0


def _groups(workload: Workload, choice: Choice) -> tuple[list[UnitWork], list[UnitWork], list[UnitWork]]:
    """Return all groups in the order of the forward, those that share the window, and those that are kept.

    Units that travel together are taken for one.
    """
    units = workload.units
    apart = {*choice.kept, *(number for number, unit in enumerate(units) if not unit.weight_bytes)}
    numbers = travel_together(range(len(units)), choice.k_prime, apart)
    groups = [_as_one([units[number] for number in group]) for group in numbers]
    streamed = [group for group, each in zip(groups, numbers, strict=True) if each[0] not in apart]
    return groups, streamed, [units[number] for number in choice.kept]


def _as_one(units: Sequence[UnitWork]) -> UnitWork:
    return UnitWork(
        units[0].name,
        weight_bytes=sum(unit.weight_bytes for unit in units),
        gradient_bytes=units[0].gradient_bytes,  # which leave last
        step_bytes=sum(unit.step_bytes for unit in units),
        forward_seconds=sum(unit.forward_seconds for unit in units),
        backward_seconds=sum(unit.backward_seconds for unit in units),
        bytes_after_step=sum(unit.bytes_after_step for unit in units),
    )


@lru_cache(maxsize=4096)  # the same window is tried with many ways for activations
def _arena_bytes(sizes: tuple[int, ...], slots: int) -> int:
    return place_in_arena(sizes, slots)[1]


class _Step:
    """A step of the optimizer, with all of its micro-steps: what `Prediction` tells of it but for memory."""

    def __init__(self, workload: Workload, machine: Machine, choice: Choice, ways: Sequence[Way]) -> None:
        self._workload, self._machine, self._slots = workload, machine, choice.slots
        self._groups, self._streamed, self._kept = _groups(workload, choice)
        units, times, trains = workload.units, workload.micro_steps, workload.trains
        loads, loads_back, again = self._loads()
        leaving = [way.leaving if trains else 0 for way in ways[:-UNITS_THAT_STAY]] + [0] * UNITS_THAT_STAY
        gradients = [unit.gradient_bytes for unit in workload.everything]
        forward = [unit.forward_seconds for unit in units]
        backward = [0.0] * len(units)
        if trains:
            backward = [unit.backward_seconds + way.repeating for unit, way in zip(units, ways, strict=True)]
        # A unit does not end before the one before it is rid of its activations, nor before they are back again.
        leaving_before = [0, *leaving[:-1]]
        self._forward = sum(map(max, forward, map(machine.down, leaving_before)))
        self._backward = sum(map(max, backward, map(machine.up, leaving_before)))
        self._loads_forward, self._again = sum(map(machine.up, loads)), sum(map(machine.up, again))
        self._loads_backward = sum(map(machine.up, [*loads_back, *leaving]))
        self._optimizer = machine.step(workload.everything) if workload.stepping else 0.0
        self.lanes = {
            Lane.COMPUTE: times * sum([*forward, *backward]),
            Lane.TO_DEVICE: times * (self._loads_forward + self._loads_backward) + self._again,
            Lane.TO_HOST: times * sum(map(machine.down, [*gradients, *leaving])),
            Lane.HOST: (times - 1) * workload.add_seconds + self._optimizer,
        }
        self.bytes_to_device = times * sum([*loads, *loads_back, *leaving]) + sum(again)
        self.bytes_to_host = times * sum([*gradients, *leaving])

    def _loads(self) -> tuple[list[int], list[int], list[int]]:
        """Return the bytes of each load in forward, in backward, and again after a step (see [Note: loads])."""
        workload, streamed, slots = self._workload, self._streamed, self._slots
        leave, come_back = streamed[:-slots], streamed[slots:]
        if not workload.trains:
            return [group.weight_bytes for group in (*leave, *streamed[max(slots, len(leave)) :])], [], []
        stay = [*streamed[:slots], *self._kept, workload.resident] if workload.stepping else []
        loads, loads_back = ([group.weight_bytes for group in groups] for groups in (come_back, leave))
        return loads, loads_back, [group.bytes_after_step for group in stay]

    def seconds(self) -> float:
        """Return how long it takes (see [Note: the time of a step])."""
        workload, machine, first, last = self._workload, self._machine, self._groups[0], self._groups[-1]
        gradients = sum(machine.down(unit.gradient_bytes) for unit in workload.units[1:])  # the first's are the turn's
        edges = [each.backward_seconds for each in (first, last)]
        backward = max(self._together(self._backward, self._loads_backward, edges), edges[-1] + gradients)
        edges = [each.forward_seconds for each in (first, last)]
        forward = self._together(self._forward, self._loads_forward, edges)
        without_step = forward + backward + workload.rest_seconds
        if not workload.stepping:
            return workload.micro_steps * without_step
        gone, stepped, sent = self._first_unit()
        landed, loads = last.backward_seconds + machine.down(last.gradient_bytes), self._loads_forward
        turn = max(gone + stepped, self._again - sent - self._spare(backward, landed)) + sent
        if workload.stepping == "after backward":  # the first unit is stepped before others, and sent before them
            landed, turn, loads = backward + gone, gone + stepped + sent, loads + self._again - sent
        forward = self._together(self._forward, loads, edges[1:])
        host = landed + workload.add_seconds + self._optimizer + machine.up(last.weight_bytes) + last.forward_seconds
        with_step = max(forward + backward + max(turn, workload.rest_seconds), host)
        return with_step + (workload.micro_steps - 1) * max(without_step, workload.add_seconds)

    def _together(self, computing: float, loads: float, edges: Sequence[float]) -> float:
        """Return how long computing and loads take; before the first load and after the last one, `edges` compute."""
        if self._slots == 1:
            return computing + loads
        return max(computing, loads + sum(edges) if loads else 0.0)

    def _first_unit(self) -> tuple[float, float, float]:
        """Return how long the first gradients, after backward, take to leave, to be stepped, and to be sent again."""
        machine, resident, groups = self._machine, self._workload.resident, self._groups
        place = next((place for place, group in enumerate(groups) if group.step_bytes), 0)
        hidden = sum(group.forward_seconds + group.backward_seconds for group in groups[:place])
        both = (groups[place], resident)
        gone = sum(machine.down(unit.gradient_bytes) for unit in both)
        return gone - hidden, machine.step(both), sum(machine.up(unit.bytes_after_step) for unit in both)

    def _spare(self, backward: float, landed: float) -> float:
        """Return the seconds of backward, after its last load, in which weights that were stepped can be sent again."""
        streamed = self._streamed
        if self._workload.stepping != "in backward":
            return 0.0
        if len(streamed) > self._slots:
            at_the_end = backward * self._slots / len(streamed) - self._machine.up(streamed[0].weight_bytes)
            kept = sum(self._machine.up(unit.bytes_after_step) for unit in self._kept)
            return max(at_the_end, min(kept, backward - landed - self._loads_backward))
        return backward - landed - self._machine.step(self._groups[-1:])
