"""The cost of a step for a given choice: its time, in closed form, and its memory.

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
Of N groups of units, of which k fit into the window, the last k stay there for backward, and the first k after it. So
N - k are sent in backward, and N - k in forward. If they were stepped in between, the k that stayed are sent again, and
so are units that are kept. In inference the first ones do not stay: all are sent, but for those that share their place
with no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sp_lightning.pipeline.activations.offload import UNITS_THAT_STAY
from sp_lightning.pipeline.activations.ways import Way, peak
from sp_lightning.pipeline.transfer.trace import Lane
from sp_lightning.pipeline.weights.device import place_in_arena, travel_together
from sp_lightning.planning.workload import Choice, Machine, UnitWork, Workload


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step of the optimizer.

    Attributes:
        choice: The choice that it is for.
        seconds: Its time, in the steady state.
        lanes: Seconds of work in each lane.
        device_bytes: Peak device memory for weights, gradients on their way and activations.
        host_bytes: Host memory for weights, gradients, optimizer state and offloaded activations.
        bytes_to_device: Bytes copied to the device.
        bytes_to_host: Bytes copied to the host.
    """

    choice: Choice
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
    ways, step = ways_of(workload, choice), _Step(workload, machine, choice)
    return Prediction(
        choice,
        seconds=step.seconds(),
        lanes=step.lanes,
        device_bytes=weight_bytes(workload, choice) + gradient_bytes(workload) + activation_bytes(workload, ways),
        host_bytes=sum(way.leaving for way in ways) + sum(unit.host_bytes for unit in workload.everything),
        bytes_to_device=step.bytes_to_device,
        bytes_to_host=step.bytes_to_host,
    )


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, and for everything that belongs to units which live on the device."""
    layout = _Layout(workload, choice)
    window = _arena_bytes(tuple(map(_bytes_of, layout.streamed)), layout.slots)
    return window + _bytes_of([*layout.kept, workload.resident]) + workload.on_device_bytes


def gradient_bytes(workload: Workload) -> int:
    """Return the device memory for gradients on their way to the host."""
    return workload.staging_buffers * max(unit.gradient_bytes for unit in workload.everything)


def activation_bytes(workload: Workload, ways: Sequence[Way]) -> int:
    """Return the peak device memory for saved tensors, and for what units and the turn take while they compute."""
    return peak(ways, workload.turn_bytes) + workload.outside_bytes if workload.trains else 0


def ways_of(workload: Workload, choice: Choice) -> tuple[Way, ...]:
    """Return, for each unit, what becomes of its activations."""
    return choice.ways or tuple(unit.ways[0] for unit in workload.units)


class _Layout:
    """How units share the device under a choice.

    Attributes:
        groups: Units that travel together, or one that has a place of its own or needs none, in the forward's order.
        streamed: Those that share the window.
        slots: How many of them fit into it.
        kept: The units that have places of their own.
    """

    def __init__(self, workload: Workload, choice: Choice) -> None:
        units = workload.units
        apart = {*choice.kept, *(number for number, unit in enumerate(units) if not unit.weight_bytes)}
        numbers = travel_together(len(units), choice.k_prime, apart)
        self.groups = [[units[number] for number in group] for group in numbers]
        self.streamed = [group for group, each in zip(self.groups, numbers, strict=True) if each[0] not in apart]
        self.slots = max(1, choice.k // choice.k_prime)
        self.kept = [units[number] for number in choice.kept]


@lru_cache(maxsize=4096)  # the same window is tried with many ways for activations
def _arena_bytes(sizes: tuple[int, ...], slots: int) -> int:
    return place_in_arena(sizes, slots)[1]


def _bytes_of(units: Sequence[UnitWork]) -> int:
    return sum(unit.weight_bytes for unit in units)


def _forward_of(units: Sequence[UnitWork]) -> float:
    return sum(unit.forward_seconds for unit in units)


def _backward_of(units: Sequence[UnitWork]) -> float:
    return sum(unit.backward_seconds for unit in units)


class _Step:
    """A step of the optimizer, with all of its micro-steps: its lanes, and how they wait for each other.

    Attributes:
        lanes: Seconds of work in each lane.
        bytes_to_device: Bytes copied to the device.
        bytes_to_host: Bytes copied to the host.
    """

    def __init__(self, workload: Workload, machine: Machine, choice: Choice) -> None:
        self._workload, self._machine = workload, machine
        self._layout, ways = _Layout(workload, choice), ways_of(workload, choice)
        units, times, trains = workload.units, workload.micro_steps, workload.trains
        loads, loads_back, again = self._loads()
        leaving = [way.leaving if trains else 0 for way in ways[:-UNITS_THAT_STAY]] + [0] * UNITS_THAT_STAY
        gradients = [unit.gradient_bytes for unit in workload.everything]
        forward = [unit.forward_seconds for unit in units]
        backward = [trains * (unit.backward_seconds + way.repeating) for unit, way in zip(units, ways, strict=True)]
        # A unit does not end before the one before it is rid of its activations, nor before they are back again.
        self._forward = sum(map(max, forward, [0.0, *map(machine.down, leaving)]))
        self._backward = sum(map(max, backward, [0.0, *map(machine.up, leaving)]))
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
        workload, streamed, slots = self._workload, self._layout.streamed, self._layout.slots
        leave, come_back = streamed[:-slots], streamed[slots:]
        if not workload.trains:
            return [_bytes_of(group) for group in [*leave, *streamed[max(slots, len(leave)) :]]], [], []
        stay = [*streamed[:slots], *([unit] for unit in (*self._layout.kept, workload.resident))]
        again = [sum(unit.bytes_after_step for unit in group) for group in stay if workload.stepping]
        return [_bytes_of(group) for group in come_back], [_bytes_of(group) for group in leave], again

    def seconds(self) -> float:
        """Return how long it takes (see [Note: the time of a step])."""
        workload, machine, first, last = self._workload, self._machine, self._layout.groups[0], self._layout.groups[-1]
        gone, stepped, sent = self._first_unit()
        gradients = sum(machine.down(unit.gradient_bytes) for unit in workload.units[1:])  # the first's are the turn's
        backward = max(
            self._together(self._backward, self._loads_backward, _backward_of([*first, *last])),
            workload.trains * last[-1].backward_seconds + gradients,
        )
        edges = _forward_of([*first, *last]) if workload.trains else 0.0
        forward = self._together(self._forward, self._loads_forward, edges)
        without_step = forward + backward + workload.rest_seconds
        if not workload.stepping:
            return workload.micro_steps * without_step
        landed = _backward_of(last) + machine.down(last[-1].gradient_bytes)
        turn = max(gone + stepped, self._again - sent - self._spare(backward, landed)) + sent
        loads = self._loads_forward
        if workload.stepping == "after backward":  # the first unit is stepped before others, and sent before them
            landed, turn, loads = backward + gone, gone + stepped + sent, loads + self._again - sent
        forward = self._together(self._forward, loads, _forward_of(last))
        host = landed + workload.add_seconds + self._optimizer + machine.up(_bytes_of(last)) + _forward_of(last)
        with_step = max(forward + backward + max(turn, workload.rest_seconds), host)
        return with_step + (workload.micro_steps - 1) * max(without_step, workload.add_seconds)

    def _together(self, computing: float, loads: float, edges: float) -> float:
        """Return how long computing and loads take; the first and the last unit's computing (`edges`) hides none."""
        if self._layout.slots == 1:
            return computing + loads
        return max(computing, loads + edges if loads else 0.0)

    def _first_unit(self) -> tuple[float, float, float]:
        """Return how long the first gradients, after backward, take to leave, to be stepped, and to be sent again."""
        machine, resident, groups = self._machine, self._workload.resident, self._layout.groups
        index = next((index for index, group in enumerate(groups) if any(unit.step_bytes for unit in group)), 0)
        first, hidden = groups[index], [unit for group in groups[:index] for unit in group]
        gone = machine.down(first[0].gradient_bytes) + machine.down(resident.gradient_bytes)
        sent = machine.up(sum(unit.bytes_after_step for unit in first)) + machine.up(resident.bytes_after_step)
        return gone - _forward_of(hidden) - _backward_of(hidden), machine.step([*first, resident]), sent

    def _spare(self, backward: float, landed: float) -> float:
        """Return the seconds of backward, after its last load, in which weights that were stepped can be sent again."""
        streamed, slots = self._layout.streamed, self._layout.slots
        if self._workload.stepping != "in backward":
            return 0.0
        if len(streamed) > slots:
            return backward * slots / len(streamed) - self._machine.up(_bytes_of(streamed[0]))
        return backward - landed - self._machine.step(self._layout.groups[-1])
