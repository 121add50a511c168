"""Predicts the time of a step by replaying the order in which the engine would issue its work.

[Note: the lanes of a step]
Nothing here is a formula for the time. The engine's own order is replayed on four clocks: computing, copies to the
device, copies to the host, work on the host. A copy begins when its lane is free, when everything that was computed
before the copy was issued is done and, for weights that are being stepped, when their optimizer step is done, too.
Computing waits for the copies that it needs. Copies are issued as `pipeline/weights/window.py` does: places are given
up when forward or backward has moved on, and filled in the order of use. Replaying a step costs one pass over the
units.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from sp_lightning.pipeline.activations.choice import Way
from sp_lightning.pipeline.activations.offload import UNITS_THAT_STAY
from sp_lightning.pipeline.gradients.landing import PIECES
from sp_lightning.pipeline.weights.device import overlaps
from sp_lightning.planning.workload import Machine, Workload


class Layout(NamedTuple):
    """Where units lie on the device.

    Attributes:
        parts: The numbers of units that travel together, or of a unit that has a place of its own.
        streamed: The parts that share the arena.
        offsets: The offset of each streamed part in the arena.
        arena_bytes: The size of the arena.
    """

    parts: list[list[int]]
    streamed: list[list[int]]
    offsets: list[int]
    arena_bytes: int


class _Group:
    """Units that travel together, or one that has a place of its own.

    Attributes:
        uses: Positions of its uses in the order of one step.
        ready: When its copy to the device is done.
        stepped: When its optimizer step is done; None as long as that has not been computed.
        missing: How many of its units have yet to give their gradients in this backward.
        landed: When its gradients are on the host.
    """

    def __init__(self, index: int, units: Sequence[int], workload: Workload) -> None:
        self.index = index
        self.units = units
        self.nbytes = sum(workload.units[unit].weight_bytes for unit in units)
        self.parameters = sum(workload.units[unit].parameters for unit in units)
        calls = [use for use, unit in enumerate(workload.order) if unit in units]
        turned = [2 * len(workload.order) - 1 - use for use in reversed(calls)] if workload.trains else []
        self.uses = [*calls, *turned]
        self.trainable = sum(workload.units[unit].gradient_bytes > 0 for unit in units)
        self.missing = self.trainable
        self.conflicts: list[_Group] = []
        self.loaded = self.nbytes == 0
        self.ready = 0.0
        self.stepped: float | None = 0.0
        self.landed = 0.0


class Replay:
    """Replays the engine's order of a step on four clocks (see the note above).

    Args:
        workload: The work of a step.
        machine: The machine's speeds.
        ways: For each unit, what becomes of its activations.
        layout: Where units lie on the device.

    Attributes:
        compute: When everything that the device was given to compute is done.
        busy: Seconds of work in each lane.
        bytes_to_device: Bytes copied to the device so far.
        bytes_to_host: Bytes copied to the host so far.
    """

    def __init__(self, workload: Workload, machine: Machine, ways: Sequence[Way], layout: Layout) -> None:
        self._workload = workload
        self._machine = machine
        self._ways = ways
        self._order = workload.order
        self._times = Counter(self._order)
        self._first_call = {unit: self._order.index(unit) for unit in self._times}
        leave = len(self._order) - UNITS_THAT_STAY
        self._offloaded = [
            self._ways[unit].leaving // self._times[unit] * (call < leave) for call, unit in enumerate(self._order)
        ]
        self._lay_out(layout)
        self.compute = self._up = self._down = self._host = 0.0
        self.busy = dict.fromkeys(("compute", "to device", "to host", "host"), 0.0)
        self.bytes_to_device = self.bytes_to_host = 0
        self._step = -1
        self._next = 0  # the first use that has not been fetched ahead
        self._pieces = [0.0] * PIECES
        self._piece = 0
        self._queued: list[_Group] = []  # groups given to the optimizer whose `stepped` has not been computed

    def _lay_out(self, layout: Layout) -> None:
        workload = self._workload
        self._length = 2 * len(self._order) if workload.trains else len(self._order)
        self._groups = [_Group(index + 1, part, workload) for index, part in enumerate(layout.parts)]
        self._group_of = {unit: group for group in self._groups for unit in group.units}
        streamed = [self._group_of[part[0]] for part in layout.streamed]
        overlapping = overlaps(layout.offsets, [group.nbytes for group in streamed])
        for group, others in zip(streamed, overlapping, strict=True):
            group.conflicts = [streamed[other] for other in others]
        self._resident = _Group(0, [], workload)
        self._resident.nbytes = workload.resident.weight_bytes
        self._resident.parameters = workload.resident.parameters

    def step(self) -> None:
        """Replay one more forward and backward."""
        workload = self._workload
        self._step += 1
        first = self._step * self._length
        if not self._resident.loaded and self._resident.nbytes:
            self._load(self._resident)
        self._fetch_ahead(first - 1, first)
        self.compute = max(self.compute, self._resident.ready)
        left = 0.0  # when the activations of the previous unit have left the device
        for call, unit in enumerate(self._order):
            self._bring(first + call)
            self._fetch_ahead(first + call, first + call)
            self._compute(workload.units[unit].forward_seconds / self._times[unit])
            if workload.trains:
                self.compute = max(self.compute, left)
                left = self._send(self._offloaded[call]) if self._offloaded[call] else 0.0
            self._fetch_ahead(first + call, first + call + 1)
        if workload.trains:
            self.compute = max(self.compute, left)
            self._compute(workload.turn_seconds)
            self._backward(first + len(self._order))
        self._compute(workload.rest_seconds, busy=False)

    def _backward(self, first: int) -> None:
        units = self._workload.units
        steps_now = self._workload.stepping == "in backward" and self._is_last_micro_step
        fetched: dict[int, float] = {}
        for group in self._groups:
            group.missing, group.landed = group.trainable, 0.0
        for position, call in enumerate(reversed(range(len(self._order))), first):
            unit = self._order[call]
            work, way, group = units[unit], self._ways[unit], self._group_of[unit]
            self._bring(position)
            self._fetch_ahead(position, position)
            if self._offloaded[call] and call not in fetched:
                fetched[call] = self._receive(self._offloaded[call])
            if call and self._offloaded[call - 1]:
                fetched[call - 1] = self._receive(self._offloaded[call - 1])
            self.compute = max(self.compute, fetched.get(call, 0.0))
            seconds = work.backward_seconds + (way.seconds if way.policy == "recompute" else 0.0)
            self._compute(seconds / self._times[unit])
            if work.gradient_bytes and call == self._first_call[unit]:  # autograd has summed up all calls' gradients
                group.landed = max(group.landed, self._ship(work.gradient_bytes))
                group.missing -= 1
                if steps_now and not group.missing:
                    self._step_group(group, position)
        if self._workload.resident.gradient_bytes:
            self._resident.landed = self._ship(self._workload.resident.gradient_bytes)
        self._after_backward(first + len(self._order) - 1)

    @property
    def _is_last_micro_step(self) -> bool:
        return (self._step + 1) % self._workload.micro_steps == 0

    def _after_backward(self, position: int) -> None:
        """Step everything that was not stepped in backward."""
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
            self._run_queue()
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
            self._run_queue(until=group)
        assert group.stepped is not None
        group.ready = self._receive(group.nbytes, group.stepped)
        group.loaded = True

    def _fetch_ahead(self, position: int, kept_from: int) -> None:
        """Load the next uses after a position, until one needs a place whose group is used before it.

        Args:
            position: The current use.
            kept_from: The position from which on uses of loaded groups count.
        """
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
        calls = len(self._order)
        return self._group_of[self._order[use if use < calls else 2 * calls - 1 - use]]

    def _next_use(self, group: _Group, position: int) -> int:
        step, position = divmod(position, self._length)
        later = bisect_left(group.uses, position)
        if later == len(group.uses):
            return (step + 1) * self._length + group.uses[0]
        return step * self._length + group.uses[later]

    # ------------------------------------------------------------------------------------------------ the optimizer

    def _step_group(self, group: _Group, position: int) -> None:
        """Give a group to the optimizer, which makes its copy on the device outdated."""
        self._queued.append(group)
        group.loaded, group.stepped = False, None
        if group is not self._resident:
            self._next = min(self._next, self._next_use(group, position + 1))

    def _run_queue(self, until: _Group | None = None) -> None:
        """Advance the host's clock over queued optimizer steps: of those that have landed, the soonest needed first.

        Args:
            until: The group to stop after. Groups behind it may still be overtaken by ones that land later.
        """
        coming = sorted(self._queued, key=lambda group: -group.landed)
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
        self._queued = [*coming, *(group for _, group in landed)]

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
        self._piece = (self._piece + 1) % PIECES
        self.compute = max(self.compute, self._pieces[self._piece])
        self._pieces[self._piece] = self._send(nbytes)
        return self._pieces[self._piece]
