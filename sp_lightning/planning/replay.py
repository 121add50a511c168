"""Predicts the time of a step by replaying the order in which the engine would issue its work.

[Note: the lanes of a step]
Nothing here is a formula for the time. The engine's own order is replayed on four clocks: computing, copies to the
device, copies to the host, work on the host. A copy begins when its lane is free, when everything that was computed
before the copy was issued is done and, for weights that are being stepped, when their optimizer step is done, too.
Computing waits for the copies that it needs. Copies are issued as `pipeline/weights/window.py` does: places are given
up when forward or backward has moved on, and filled in the order of use. Replaying a step costs one pass over the
units. The sections of a unit are taken to be of equal size: only when the first and the last are done is computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from sp_lightning.pipeline.activations.offload import UNITS_THAT_STAY
from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.gradients.buffers import STAGING_BUFFERS
from sp_lightning.pipeline.transfer.trace import Lane
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


class _Done(NamedTuple):
    """When the first section of something is done, and when the last one is."""

    first: float
    last: float

    def then(self, later: _Done) -> _Done:
        """Return when sections of both are done."""
        return _Done(max(self.last, later.first), max(self.last, later.last))

    def before_last(self, count: int, sections: int) -> float:
        """Return when the section is done after which `count` sections are left."""
        return self.last - (self.last - self.first) * count / max(1, sections - 1)


_LONG_AGO = _Done(0.0, 0.0)


class _Group:
    """Units that travel together, or one that has a place of its own.

    Attributes:
        uses: Positions of its uses in the order of one step.
        ready: When its copy to the device is done.
        stepped: When its optimizer step is done; None as long as that has not been computed.
        missing: How many of its units have yet to give their gradients in this backward.
        landed: When its gradients are on the host.
        asked: What had been computed when its copy to the device was asked for.
        sections: Number of sections that it is copied and stepped in.
        left: How many of them are still to be stepped.
        first_stepped: When the first of them was stepped.
        after_step: How many bytes that copy has, if all but the weights that were stepped still lies in its place.
        in_place: Whether it lies in its place on the device, but for the weights that were stepped.
        sent: How many bytes its copy to the device has.
    """

    def __init__(self, index: int, units: Sequence[int], workload: Workload) -> None:
        self.index = index
        self.units = units
        self.nbytes = sum(workload.units[unit].weight_bytes for unit in units)
        self.parameters = sum(workload.units[unit].parameters for unit in units)
        self.sections = 1 + sum(workload.units[unit].sections - 1 for unit in units)
        calls = [use for use, unit in enumerate(workload.order) if unit in units]
        turned = [2 * len(workload.order) - 1 - use for use in reversed(calls)] if workload.trains else []
        self.uses = [*calls, *turned]
        self.trainable = sum(workload.units[unit].gradient_bytes > 0 for unit in units)
        self.missing = self.trainable
        self.conflicts: list[_Group] = []
        self.loaded = self.nbytes == 0
        self.asked = self.ready = 0.0
        self.stepped: _Done | None = _LONG_AGO
        self.landed = _LONG_AGO
        self.left = 0
        self.first_stepped = 0.0
        self.after_step = sum(workload.units[unit].bytes_after_step for unit in units)
        self.in_place = False
        self.sent = self.nbytes


class Replay:
    """Replays the engine's order of a step on four clocks (see [Note: the lanes of a step]).

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
        self.busy = dict.fromkeys(Lane, 0.0)
        self.bytes_to_device = self.bytes_to_host = 0
        self._step = -1
        self._next = 0  # the first use that has not been fetched ahead
        self._staging = [0.0] * STAGING_BUFFERS
        self._turn = 0
        self._landing: list[_Group] = []  # groups given to the optimizer, the next one to land last
        self._landed: list[tuple[int, _Group]] = []  # those that have landed, as a heap: the soonest needed first
        self._coming: list[_Group] = []  # groups that are sent as soon as they have been stepped

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
        self._resident.after_step = workload.resident.bytes_after_step
        self._resident.parameters = workload.resident.parameters
        self._resident.sections = workload.resident.sections

    def step(self) -> None:
        """Replay one more forward and backward."""
        workload = self._workload
        self._step += 1
        first = self._step * self._length
        if not self._resident.loaded and self._resident.nbytes:
            self._load(self._resident)
        self._fetch_ahead(first - 1, first)
        self._wait_for(self._resident)
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
            group.missing, group.landed = group.trainable, _LONG_AGO
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
            self._compute((work.backward_seconds + way.repeating) / self._times[unit])
            if work.gradient_bytes and call == self._first_call[unit]:  # autograd has summed up all calls' gradients
                group.landed = group.landed.then(self._ship(work.gradient_bytes, work.sections))
                group.missing -= 1
                if steps_now and not group.missing:
                    self._step_group(group, position)
        if self._workload.resident.gradient_bytes:
            resident = self._workload.resident
            self._resident.landed = self._ship(resident.gradient_bytes, resident.sections)
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
            landed = max(group.landed.last for group in (self._resident, *self._groups))
            for group in (self._resident, *self._groups):
                group.landed = _Done(landed, landed)
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
        self._wait_for(group)

    def _wait_for(self, group: _Group) -> None:
        """Have computing wait for a group's copy to the device."""
        if group in self._coming:
            self._run_queue(until=group)
            assert group.stepped is not None
            self._send_stepped(by=group.stepped.first)
        self.compute = max(self.compute, group.ready)

    def _load(self, group: _Group) -> None:
        for other in group.conflicts:
            other.loaded = other.in_place = False
        group.sent = group.after_step if group.in_place else group.nbytes
        group.loaded, group.in_place, group.asked = True, False, self.compute
        self._coming.append(group)
        self._send_what_is_stepped_now()

    def _send_what_is_stepped_now(self) -> None:
        if self._coming:
            if self._host < self.compute:
                self._run_queue(before=self.compute)
            self._send_stepped(by=self.compute)

    def _send_stepped(self, by: float) -> None:
        """Send the groups that have been stepped by a moment; those that have not hold up no other copy."""
        stepped = [(group.stepped, group) for group in self._coming if group.stepped and group.stepped.first <= by]
        for done, group in sorted(stepped, key=lambda pair: max(pair[0].first, pair[1].asked)):
            self._coming.remove(group)
            group.ready = self._upload(group.sent, max(group.asked, done.first), done.last, group.sections)

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
        insort(self._landing, group, key=lambda group: -group.landed.first)
        group.in_place = group.in_place or group.loaded
        group.loaded, group.stepped, group.left = False, None, group.sections
        if group is not self._resident:
            self._next = min(self._next, self._next_use(group, position + 1))

    def _run_queue(self, until: _Group | None = None, before: float = inf) -> None:
        """Advance the host's clock over queued optimizer steps: of those that have landed, the soonest needed first.

        Args:
            until: The group to stop after. Groups behind it may still be overtaken by ones that land later.
            before: The moment to stop at, for the same reason.
        """
        while (self._landing or self._landed) and (until is None or until.stepped is None):
            begin = self._host if self._landed else max(self._host, self._next_to_land.landed.first)
            if begin >= before:
                break
            self._host = begin
            while self._landing and self._next_to_land.landed.first <= self._host:
                group = self._landing.pop()
                heappush(self._landed, (group.index, group))
            _, group = heappop(self._landed)
            is_overtaken = self._landing and self._next_to_land.index < group.index
            self._step_sections(group, until=self._next_to_land.landed.first if is_overtaken else inf)
            if group.left:
                heappush(self._landed, (group.index, group))

    @property
    def _next_to_land(self) -> _Group:
        return self._landing[-1]

    def _step_sections(self, group: _Group, until: float) -> None:
        """Step the sections of a group that are left, as far as they begin before something more urgent has landed."""
        each = group.parameters / self._machine.optimizer / group.sections
        if group.left == group.sections:
            group.first_stepped = self._host + each
        count = min(group.left, max(1, ceil((until - self._host) / each))) if until < inf and each else group.left
        group.left -= count
        self._host = max(self._host + count * each, group.landed.before_last(group.left, group.sections) + each)
        self.busy[Lane.HOST] += count * each
        if not group.left:
            group.stepped = _Done(group.first_stepped, self._host)

    # -------------------------------------------------------------------------------------------------- the lanes

    def _compute(self, seconds: float, busy: bool = True) -> None:
        self.compute += seconds
        self.busy[Lane.COMPUTE] += seconds * busy

    def _receive(self, nbytes: int) -> float:
        self._send_what_is_stepped_now()
        return self._upload(nbytes, self.compute)

    def _upload(self, nbytes: int, begin: float, stepped: float = 0.0, sections: int = 1) -> float:
        seconds = nbytes / self._machine.to_device + self._machine.copy_seconds
        self._up = max(max(self._up, begin) + seconds, stepped + seconds / sections)
        self.busy[Lane.TO_DEVICE] += seconds
        self.bytes_to_device += nbytes
        return self._up

    def _send(self, nbytes: int) -> float:
        seconds = nbytes / self._machine.to_host + self._machine.copy_seconds
        self._down = max(self._down, self.compute) + seconds
        self.busy[Lane.TO_HOST] += seconds
        self.bytes_to_host += nbytes
        return self._down

    def _ship(self, nbytes: int, sections: int) -> _Done:
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        self.compute = max(self.compute, self._staging[self._turn])
        begin = max(self._down, self.compute)
        end = self._staging[self._turn] = self._send(nbytes)
        is_added = self._workload.micro_steps > 1  # as a whole, to the gradients that are there
        return _Done(end if is_added else begin + (end - begin) / sections, end)
