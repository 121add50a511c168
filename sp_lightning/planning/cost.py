"""The work of a step, the memory that it takes with a given choice, and the ways that activations can go.

[Note: the peak]
From its forward to its backward a unit holds something: all that it saved, or its inputs alone, or next to nothing if
these wait on the host. While it computes, in forward and in backward, it takes more. Meanwhile the units before it hold
theirs, and those after it hold nothing yet, or nothing any more. What the unit before it saved may still be leaving for
the host, or be coming back already. So the peak is the largest, over all units, of what the units before one hold, what
of the last of them is under way, and what that one needs to compute; or, at the turn from forward to backward, what all
units hold and what is taken after them. Gradients of units that visit stay from their backward until they are stepped,
in the next forward: while a unit computes, its own and those of units after it are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from sp_lightning.optim.on_device import PIECE
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.activations.policy import OFFLOADING, RECOMPUTING, WITHOUT_RECOMPUTING
from sp_lightning.pipeline.gradients.buffers import landing_buffers
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.optimizer.pieces import PIECES_AT_ONCE
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS
from sp_lightning.pipeline.window.places import place_in_arena, travel_together

# units before the turn for which sending activations gains nothing: backward needs them at once
UNITS_THAT_STAY = 1
# the part of its time that a copy of activations costs even if computing hides it
_HIDDEN_COST = 0.1

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
    visit_piece: int = 0  # of the device, for one piece of its visit
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
    # of the units that live on the device, with gradients and optimizer state
    on_device_bytes: int = 0
    on_device_step_bytes: int = 0  # which the steps of these read and write there
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
                units[number] = replace(unit, visit_up=0, visit_down=0, visit_piece=0)
        return replace(
            self,
            units=tuple(units[:-1]),
            resident=units[-1],
            on_device_bytes=self.on_device_bytes + sum(unit.bytes_on_device for unit in living),
            on_device_step_bytes=self.on_device_step_bytes + sum(unit.step_bytes for unit in living),
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


@dataclass(frozen=True)
class Window:
    """The units as they travel: neighbors that do so together are one."""

    in_order: list[UnitWork]  # all, in the order of the forward
    streams: list[bool]  # whether each of these shares the arena
    streamed: list[UnitWork]  # those that do
    kept: list[UnitWork]


def window_of(workload: Workload, choice: Choice) -> Window:
    """Return the units of a choice as they travel."""
    units = workload.units
    alone = _alone(workload, choice)
    parts = travel_together(range(len(units)), choice.k_prime, alone)
    in_order = [_joined([units[number] for number in numbers]) for numbers in parts]
    streams = [numbers[0] not in alone for numbers in parts]
    streamed = [unit for unit, shares in zip(in_order, streams, strict=True) if shares]
    return Window(in_order, streams, streamed, [units[number] for number in choice.kept])


def _alone(workload: Workload, choice: Choice) -> set[int]:
    """Return the numbers of units that do not stream: they live on the device, or are kept there."""
    return {number for number, unit in enumerate(workload.units) if not unit.weight_bytes}.union(choice.kept)


def bytes_of_piece(nbytes: int, numbers: int) -> int:
    """Return how many of the bytes of a visit are in its largest piece, if it steps so many numbers."""
    return nbytes * min(PIECE, numbers) // max(1, numbers)


def _joined(units: Sequence[UnitWork]) -> UnitWork:
    """Return the work of units that are sent with one copy."""
    if len(units) == 1:
        return units[0]
    visits = all(unit.visit_up for unit in units)
    return UnitWork(
        units[0].name,
        weight_bytes=sum(unit.weight_bytes for unit in units),
        # which leave last: each one's leave with a copy of their own
        gradient_bytes=units[0].gradient_bytes,
        step_bytes=sum(unit.step_bytes for unit in units),
        forward_seconds=sum(unit.forward_seconds for unit in units),
        backward_seconds=sum(unit.backward_seconds for unit in units),
        bytes_after_step=sum(unit.bytes_after_step for unit in units),
        # they visit together or not at all
        visit_up=sum(unit.visit_up for unit in units) if visits else 0,
        visit_down=sum(unit.visit_down for unit in units) if visits else 0,
    )


def device_bytes(workload: Workload, choice: Choice, ways: Sequence[Way]) -> int:
    """Return the peak device memory of weights, gradients and activations; see `Workload.placed`."""
    return weight_bytes(workload, choice) + gradient_bytes(workload) + activation_bytes(workload, ways)


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, for all else of units that live there, and for the pieces of visits."""
    sizes = [unit.weight_bytes for unit in workload.units]
    alone = _alone(workload, choice)
    parts = travel_together(range(len(sizes)), choice.k_prime, alone)
    streamed = tuple(sum(sizes[number] for number in part) for part in parts if part[0] not in alone)
    arena = _arena_bytes(streamed, choice.slots)
    own_places = workload.resident.weight_bytes + sum(sizes[number] for number in choice.kept)
    pieces = PIECES_AT_ONCE * max(unit.visit_piece for unit in workload.everything)
    return arena + own_places + workload.on_device_bytes + pieces


def gradient_bytes(workload: Workload) -> int:
    """Return the device memory for gradients on their way to the host."""
    return STAGING_BUFFERS * max(leaving_gradients(workload))


def landing_bytes(workload: Workload, k_prime: int) -> int:
    """Return the host memory for gradients: for few where they are stepped or added as they come, else for all."""
    gradients = sorted(leaving_gradients(workload), reverse=True)
    if workload.stepping == "in backward" or workload.adds_up:
        gradients = gradients[: landing_buffers(len(gradients), k_prime)]
    return sum(gradients)


def leaving_gradients(workload: Workload) -> list[int]:
    """Return the bytes of the gradients of each unit that go to the host."""
    stay = workload.gradients_stay
    return [0 if stay and unit.visit_up else unit.gradient_bytes for unit in workload.everything]


def peak(ways: Sequence[Way], turn: int = 0, staying: Sequence[int] = ()) -> int:
    """Return the most bytes that are on the device at once, if so many are taken at the turn; see [Note: the peak].

    Of each unit's gradients so many bytes stay.
    """
    held = most = under_way = 0
    gradients = sum(staying)
    for number, way in enumerate(ways):
        most = max(most, held + under_way + way.working + gradients)
        held += way.held
        under_way = way.under_way
        if staying:
            gradients -= staying[number]
    return max(most, held + under_way + turn)


def activation_bytes(workload: Workload, ways: Sequence[Way]) -> int:
    """Return the peak device memory for saved tensors, gradients that stay, and what units and the turn take."""
    staying = []
    if workload.gradients_stay and any(unit.visit_up for unit in workload.units):
        staying = [unit.gradient_bytes if unit.visit_up else 0 for unit in workload.units]
    return peak(ways, workload.turn_bytes, staying) + workload.outside_bytes if workload.trains else 0


@lru_cache(maxsize=4096)  # the same window is tried with many ways for activations
def _arena_bytes(sizes: tuple[int, ...], slots: int) -> int:
    return place_in_arena(sizes, slots)[1]


def ways_of(
    unit: UnitWork,
    calls: Sequence[Footprint],
    second_forward: float,
    machine: Machine | None,
    inputs_stay: bool = False,
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members, as far as they can follow.

    Its second forward takes so many seconds. Without a machine, whose copies cost something, nothing can be offloaded.
    If `inputs_stay`, those of the first member are the batch, which whoever runs the step holds.
    """
    policies: tuple[Policy, ...] = get_args(Policy)
    ways: dict[tuple[int, int], Way] = {}
    for policy in policies:
        if machine is None and policy in OFFLOADING:
            continue
        members = [_way_of(calls[0], policy, inputs_stay)]
        members += [_way_of(call, policy, inputs_stay=False) for call in calls[1:]]
        held = sum(way.held for way in members)
        leaving = sum(way.leaving for way in members)
        repeats = any(way.policy in RECOMPUTING for way in members)
        repeating = second_forward if repeats else 0.0
        seconds = repeating
        if machine is not None and leaving:
            seconds += _offload_seconds(machine, unit, leaving, repeating)
        under_way = members[-1].under_way
        way = Way(policy, held, peak(members), seconds, leaving, under_way, repeating)
        ways.setdefault((held, leaving), way)
    return tuple(ways.values())


def _offload_seconds(machine: Machine, unit: UnitWork, nbytes: int, repeating: float) -> float:
    """Return what it costs to have so many bytes of a unit's activations wait on the host.

    Its forward hides their way out. Its backward, in which it computes for so many more seconds if its forward runs
    again, hides the way back of them and of its weights.
    """
    backward = unit.backward_seconds + repeating
    sending = max(0.0, machine.down(nbytes) - unit.forward_seconds)
    waiting_anyway = max(0.0, machine.up(unit.weight_bytes) - backward)
    fetching = max(0.0, machine.up(unit.weight_bytes + nbytes) - backward) - waiting_anyway
    return sending + fetching + _HIDDEN_COST * (machine.up(nbytes) + machine.down(nbytes))


def _way_of(call: Footprint, policy: Policy, inputs_stay: bool) -> Way:
    """Return the way of a member's activations, without what it costs."""
    followed = policy if call.repeatable else WITHOUT_RECOMPUTING.get(policy, policy)
    inputs = 0 if inputs_stay else call.held
    held = call.held
    if followed not in RECOMPUTING:
        held += call.saved
    leaving = 0
    if followed == "offload":
        leaving = min(call.large, inputs + call.saved)
    elif followed == "recompute_offload":
        leaving = inputs
    return Way(followed, held - leaving, call.working, 0.0, leaving, under_way=leaving)
