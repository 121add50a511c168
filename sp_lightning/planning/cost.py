"""What a step costs, for given choices: its time, lane by lane, and the device's memory (docs/planning.md).

[Note: the lanes of a step]
Nothing here is a formula for the time. The engine's own order is replayed on four clocks: computing, copies to the
device, copies to the host, work on the host. A copy begins when its lane is free, when all that was computed before it
was asked for is done, and, for weights that an optimizer is still at, when that is done, too. Computing waits for the
copy of what it needs. What is asked for when is what `pipeline/weights/window.py` does: places are given away when
backward or forward has moved on, and filled in the order of use. Costs one pass over the units per step that is
replayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from sp_lightning.pipeline.activations.choice import Way, peak
from sp_lightning.pipeline.activations.offload import STAYING
from sp_lightning.pipeline.gradients.landing import PIECES
from sp_lightning.pipeline.weights.device import place_in_arena, travel_together
from sp_lightning.planning.workload import Machine, Workload

_WARM_UP = 1  # steps until each one is like the one before


@dataclass(frozen=True)
class Choice:
    """What can be chosen.

    Args:
        k: Units on the device at once, resident ones not counted.
        k_prime: Units moved together.
        resident: Units, by their numbers, that have a place of their own and are never evicted.
        ways: What becomes of the activations of each unit; the first of its ways where nothing is given.
        on_device: Units, by their numbers, that live on the device with gradients and optimizer state.
    """

    k: int
    k_prime: int = 1
    resident: tuple[int, ...] = ()
    ways: tuple[Way, ...] = ()
    on_device: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What a step will take.

    Attributes:
        seconds: For one step of the optimizer, when all steps are alike.
        lanes: Seconds of work in each lane.
        device_bytes: The most device memory for weights, gradients on their way and activations.
        host_bytes: Host memory for weights, gradients, optimizer state and activations that wait there.
        bytes_to_device: Per step.
        bytes_to_host: Per step.
    """

    seconds: float
    lanes: dict[str, float]
    device_bytes: int
    host_bytes: int
    bytes_to_device: int
    bytes_to_host: int

    @property
    def bottleneck(self) -> str:
        """The lane that has most to do."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """What a step takes with these choices."""
    workload = workload.with_on_device(choice.on_device)
    replay = _Replay(workload, machine, choice)
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
    """What a step takes at least with these ways, whatever the window: the work of the busiest lane."""
    everything = (*workload.units, workload.resident)
    second = sum(way.seconds for way in ways if way.policy == "recompute")
    compute = sum(unit.forward_seconds + workload.trains * unit.backward_seconds for unit in workload.units)
    between = workload.rest_seconds + workload.trains * (workload.turn_seconds + second)
    to_device = sum(unit.weight_bytes for unit in everything if unit.parameters) if workload.stepping else 0
    to_host = sum(unit.gradient_bytes for unit in everything) * workload.micro_steps
    stepped = sum(unit.parameters for unit in everything) if workload.stepping else 0
    return max(
        (compute + between) * workload.micro_steps,
        to_device / machine.to_device,
        to_host / machine.to_host,
        stepped / machine.optimizer,
    )


def device_bytes(workload: Workload, choice: Choice) -> int:
    """The most device memory that weights, gradients on their way and activations take."""
    return (
        weight_bytes(workload, choice)
        + gradient_bytes(workload)
        + activation_bytes(workload, ways_of(workload, choice))
    )


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Device memory for weights, and for all that units which live there have: the arena, and places of their own."""
    own = sum(workload.units[unit].weight_bytes for unit in choice.resident) + workload.resident.weight_bytes
    return own + _places(workload, choice)[-1] + workload.on_device_bytes


def gradient_bytes(workload: Workload) -> int:
    """Device memory for gradients on their way to the host."""
    return PIECES * max(workload.piece_bytes, *(u.gradient_bytes for u in (*workload.units, workload.resident)))


def activation_bytes(workload: Workload, ways: Sequence[Way]) -> int:
    """Device memory for what autograd saves, and for what operations take while it is there."""
    return peak(ways, workload.turn_bytes) + workload.outside_bytes if workload.trains else 0


def host_bytes(workload: Workload, choice: Choice) -> int:
    """Host memory for weights, gradients, optimizer state and activations that wait there."""
    waiting = sum(way.leaving for way in ways_of(workload, choice))
    return waiting + sum(unit.host_bytes for unit in (*workload.units, workload.resident))


def ways_of(workload: Workload, choice: Choice) -> tuple[Way, ...]:
    """What becomes of the activations of each unit."""
    return choice.ways or tuple(unit.ways[0] for unit in workload.units)


def _places(workload: Workload, choice: Choice) -> tuple[list[list[int]], list[int], int]:
    """What travels together, where each part that streams lies in the arena, and the bytes of the arena."""
    apart = {*choice.resident, *(number for number, unit in enumerate(workload.units) if unit.lives_on_device)}
    parts = travel_together(len(workload.units), choice.k_prime, apart)
    streamed = [part for part in parts if part[0] not in apart]
    sizes = tuple(sum(workload.units[unit].weight_bytes for unit in part) for part in streamed)
    return parts, *_arena(sizes, max(1, choice.k // choice.k_prime))


@lru_cache(maxsize=1024)  # the same window is looked at with many ways for activations
def _arena(sizes: tuple[int, ...], window: int) -> tuple[list[int], int]:
    return place_in_arena(sizes, window)


class _Group:
    """Units that travel together, or one that has a place of its own.

    Attributes:
        uses: Where it is used in the order of one step.
        ready: When its copy to the device will be done.
        stepped: When the optimizer is done with it; None as long as that has not been worked out.
        missing: How many of its units have still to give their gradients in this backward.
    """

    def __init__(self, index: int, units: Sequence[int], workload: Workload, length: int) -> None:
        self.index = index
        self.units = units
        self.nbytes = sum(workload.units[unit].weight_bytes for unit in units)
        self.parameters = sum(workload.units[unit].parameters for unit in units)
        turned = [2 * length - 1 - unit for unit in units] if workload.trains else []
        self.uses = sorted([*units, *turned])
        self.trainable = sum(workload.units[unit].gradient_bytes > 0 for unit in units)
        self.missing = self.trainable
        self.conflicts: list[_Group] = []
        self.loaded = self.nbytes == 0
        self.ready = 0.0
        self.stepped: float | None = 0.0
        self.landed = 0.0


class _Replay:
    """The engine's order of a step, on four clocks (see the note above).

    Attributes:
        compute: When all that the device was given to compute is done.
        busy: Seconds of work in each lane.
    """

    def __init__(self, workload: Workload, machine: Machine, choice: Choice) -> None:
        self._workload = workload
        self._machine = machine
        self._ways = ways_of(workload, choice)
        leave = len(workload.units) - STAYING
        self._offloaded = [way.leaving * (unit < leave) for unit, way in enumerate(self._ways)]
        self._lay_out(choice)
        self.compute = self._up = self._down = self._host = 0.0
        self.busy = dict.fromkeys(("compute", "to device", "to host", "host"), 0.0)
        self.bytes_to_device = self.bytes_to_host = 0
        self._step = -1
        self._next = 0  # the first use that has not been fetched ahead
        self._pieces = [0.0] * PIECES
        self._turn = 0
        self._given: list[_Group] = []  # to the optimizer, which has not been asked when it will be done

    def _lay_out(self, choice: Choice) -> None:
        workload, length = self._workload, len(self._workload.units)
        self._length = 2 * length if workload.trains else length
        parts, offsets, _ = _places(workload, choice)
        self._groups = [_Group(index + 1, part, workload, length) for index, part in enumerate(parts)]
        self._group_of = {unit: group for group in self._groups for unit in group.units}
        streamed = (group for group in self._groups if group.nbytes and group.units[0] not in choice.resident)
        ring = [*zip(streamed, offsets, strict=True)]
        for group, start in ring:
            group.conflicts = [
                other
                for other, begin in ring
                if other is not group and begin < start + group.nbytes and start < begin + other.nbytes
            ]
        self._resident = _Group(0, [], workload, length)
        self._resident.nbytes = workload.resident.weight_bytes
        self._resident.parameters = workload.resident.parameters

    def step(self) -> None:
        """One more forward and backward."""
        workload, length = self._workload, len(self._workload.units)
        self._step += 1
        first = self._step * self._length
        if not self._resident.loaded and self._resident.nbytes:
            self._load(self._resident)
        self._fetch_ahead(first - 1, first)
        self.compute = max(self.compute, self._resident.ready)
        left = 0.0  # when the activations of the unit before have left
        for unit, work in enumerate(workload.units):
            self._bring(first + unit)
            self._fetch_ahead(first + unit, first + unit)
            self._compute(work.forward_seconds)
            if workload.trains:
                self.compute = max(self.compute, left)
                left = self._send(self._offloaded[unit]) if self._offloaded[unit] else 0.0
            self._fetch_ahead(first + unit, first + unit + 1)
        if workload.trains:
            self.compute = max(self.compute, left)
            self._compute(workload.turn_seconds)
            self._backward(first + length)
        self._compute(workload.rest_seconds, busy=False)

    def _backward(self, first: int) -> None:
        units = self._workload.units
        steps_now = self._workload.stepping == "in backward" and self._is_last_micro_step
        fetched: dict[int, float] = {}
        for group in self._groups:
            group.missing, group.landed = group.trainable, 0.0
        for position, unit in enumerate(reversed(range(len(units))), first):
            work, way, group = units[unit], self._ways[unit], self._group_of[unit]
            self._bring(position)
            self._fetch_ahead(position, position)
            if self._offloaded[unit] and unit not in fetched:
                fetched[unit] = self._receive(self._offloaded[unit])
            if unit and self._offloaded[unit - 1]:
                fetched[unit - 1] = self._receive(self._offloaded[unit - 1])
            self.compute = max(self.compute, fetched.get(unit, 0.0))
            self._compute(work.backward_seconds + (way.seconds if way.policy == "recompute" else 0.0))
            if work.gradient_bytes:
                group.landed = max(group.landed, self._ship(work.gradient_bytes))
                group.missing -= 1
                if steps_now and not group.missing:
                    self._step_group(group, position)
        if self._workload.resident.gradient_bytes:
            self._resident.landed = self._ship(self._workload.resident.gradient_bytes)
        self._after_backward(first + len(units) - 1)

    @property
    def _is_last_micro_step(self) -> bool:
        return (self._step + 1) % self._workload.micro_steps == 0

    def _after_backward(self, position: int) -> None:
        """Step what was not stepped in backward."""
        stepping = self._workload.stepping
        if stepping is None or not self._is_last_micro_step:
            return
        if self._workload.clips:
            landed = max(group.landed for group in (self._resident, *self._groups))
            for group in (self._resident, *self._groups):
                group.landed = landed
        if self._resident.parameters:
            self._step_group(self._resident, position)
        if stepping != "in backward":
            for group in [group for group in self._groups if group.parameters]:
                self._step_group(group, position)
        if stepping == "apart":
            self._let_step()
            self.compute = max(self.compute, self._host)

    # ------------------------------------------------------------------------------------------------------ weights

    def _bring(self, position: int) -> None:
        group = self._group_at(position)
        if not group.loaded:
            self._load(group)
            self._next = position + 1
        self.compute = max(self.compute, group.ready)

    def _load(self, group: _Group) -> None:
        for other in group.conflicts:
            other.loaded = False
        if group.stepped is None:
            self._let_step(until=group)
        assert group.stepped is not None
        group.ready = self._receive(group.nbytes, group.stepped)
        group.loaded = True

    def _fetch_ahead(self, position: int, kept_from: int) -> None:
        """Load what is used after a position, as far as no place is taken that is used from `kept_from` on."""
        use = max(self._next, position + 1)
        while use <= position + self._length:
            group = self._group_at(use)
            if not group.loaded:
                taken = [other for other in group.conflicts if other.loaded]
                if any(self._next_use(other, kept_from) < use for other in taken):
                    break
                self._load(group)
            use += 1
        self._next = use

    def _group_at(self, use: int) -> _Group:
        use %= self._length
        units = len(self._workload.units)
        return self._group_of[use if use < units else 2 * units - 1 - use]

    def _next_use(self, group: _Group, position: int) -> int:
        step, position = divmod(position, self._length)
        later = bisect_left(group.uses, position)
        if later == len(group.uses):
            return (step + 1) * self._length + group.uses[0]
        return step * self._length + group.uses[later]

    # ------------------------------------------------------------------------------------------------ the optimizer

    def _step_group(self, group: _Group, position: int) -> None:
        """The optimizer is given a group; what is on the device is outdated."""
        self._given.append(group)
        group.loaded, group.stepped = False, None
        if group is not self._resident:
            self._next = min(self._next, self._next_use(group, position + 1))

    def _let_step(self, until: _Group | None = None) -> None:
        """Give the optimizer's work its time: of what has landed, what the next forward needs first comes first.

        Args:
            until: The group that is waited for. What comes after it may still be overtaken by what lands later.
        """
        coming = sorted(self._given, key=lambda group: -group.landed)
        landed: list[tuple[int, _Group]] = []
        while (coming or landed) and (until is None or until.stepped is None):
            if not landed:
                self._host = max(self._host, coming[-1].landed)
            while coming and coming[-1].landed <= self._host:
                group = coming.pop()
                heappush(landed, (group.index, group))
            _, group = heappop(landed)
            seconds = group.parameters / self._machine.optimizer
            self._host += seconds
            self.busy["host"] += seconds
            group.stepped = self._host
        self._given = [*coming, *(group for _, group in landed)]

    # -------------------------------------------------------------------------------------------------- the lanes

    def _compute(self, seconds: float, busy: bool = True) -> None:
        self.compute += seconds
        self.busy["compute"] += seconds * busy

    def _receive(self, nbytes: int, after: float = 0.0) -> float:
        seconds = nbytes / self._machine.to_device + self._machine.copy_seconds
        self._up = max(self._up, self.compute, after) + seconds
        self.busy["to device"] += seconds
        self.bytes_to_device += nbytes
        return self._up

    def _send(self, nbytes: int) -> float:
        seconds = nbytes / self._machine.to_host + self._machine.copy_seconds
        self._down = max(self._down, self.compute) + seconds
        self.busy["to host"] += seconds
        self.bytes_to_host += nbytes
        return self._down

    def _ship(self, nbytes: int) -> float:
        self._turn = (self._turn + 1) % PIECES
        self.compute = max(self.compute, self._pieces[self._turn])
        self._pieces[self._turn] = self._send(nbytes)
        return self._pieces[self._turn]
