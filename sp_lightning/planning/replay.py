"""A step as the engine would run it, in the order in which it would ask for things: how long it takes.

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
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from sp_lightning.pipeline.activations.choice import Way
from sp_lightning.pipeline.activations.offload import STAYING
from sp_lightning.pipeline.gradients.landing import PIECES
from sp_lightning.pipeline.weights.device import overlaps
from sp_lightning.planning.workload import Machine, Workload


class Layout(NamedTuple):
    """Where units lie on the device.

    Attributes:
        parts: Numbers of units that travel together, or of one that has a place of its own.
        streamed: Those of the parts that share the arena.
        offsets: Where each of these lies in it.
        arena_bytes: How large it is.
    """

    parts: list[list[int]]
    streamed: list[list[int]]
    offsets: list[int]
    arena_bytes: int


class _Group:
    """Units that travel together, or one that has a place of its own.

    Attributes:
        uses: Where it is used in the order of one step.
        ready: When its copy to the device will be done.
        stepped: When the optimizer is done with it; None as long as that has not been worked out.
        missing: How many of its units have still to give their gradients in this backward.
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
    """The engine's order of a step, on four clocks (see the note above).

    Args:
        workload: What a step has to do.
        machine: How fast.
        ways: What becomes of the activations of each unit.
        layout: Where units lie.

    Attributes:
        compute: When all that the device was given to compute is done.
        busy: Seconds of work in each lane.
        bytes_to_device: What was copied there.
        bytes_to_host: What was copied there.
    """

    def __init__(self, workload: Workload, machine: Machine, ways: Sequence[Way], layout: Layout) -> None:
        self._workload = workload
        self._machine = machine
        self._ways = ways
        self._order = workload.order
        self._times = Counter(self._order)
        self._first_call = {unit: self._order.index(unit) for unit in self._times}
        leave = len(self._order) - STAYING
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
        self._turn = 0
        self._given: list[_Group] = []  # to the optimizer, which has not been asked when it will be done

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
        """One more forward and backward."""
        workload = self._workload
        self._step += 1
        first = self._step * self._length
        if not self._resident.loaded and self._resident.nbytes:
            self._load(self._resident)
        self._fetch_ahead(first - 1, first)
        self.compute = max(self.compute, self._resident.ready)
        left = 0.0  # when the activations of the unit before have left
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
            if work.gradient_bytes and call == self._first_call[unit]:  # autograd has summed up those of all calls
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
