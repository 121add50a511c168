"""The time of a step: its lanes run once through it, unit by unit, from one backward to the next.

[Note: the time of a step]
Computing, copies in both directions and work on the host go on side by side. Each lane does one thing after the other,
as soon as what that waits for is done:

    a load         a free place, and, after a step of the optimizer, the unit's new weights on the host
    computing      the unit's weights, and its activations if they wait on the host
    gradients      one of two buffers on the device, so computing waits for the copy before the last one
    steps          their gradients or, clipped, those of all units; of several that could begin, the first unit's
    visits         the same, and the visit before; after backward, the moment at which their unit is loaded

The link is shared by copies up and down, the host's memory by all copies and the steps on the host: no part of a step
takes less time than what they have to move there.

[Note: loads]
Of N units, of which k fit into the window, the last k stay there for backward, and the first k after it:
N - k are sent in backward, and N - k in forward. After a step, what stayed is sent again. Where a visit after backward
brings new weights, only the others are sent. In inference the first ones do not stay: all are sent, but for those that
share their place with no other.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS
from sp_lightning.planning.memory import device_bytes, landing_bytes
from sp_lightning.planning.work import Choice, Machine, Prediction, UnitWork, Workload


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step takes with a choice."""
    course = _Course(workload, machine, choice)
    seconds = course.run(steps=bool(workload.stepping))
    for _ in range(workload.micro_steps - 1):
        seconds += max(course.run(steps=False), course.add_seconds)
    offloaded = sum(way.leaving for way in choice.ways)
    living = set(choice.living)
    on_host = sum(unit.host_bytes for number, unit in enumerate(workload.everything) if number not in living)
    return Prediction(
        choice,
        seconds,
        lanes={lane: at_work.busy for lane, at_work in course.lanes.items()},
        device_bytes=device_bytes(workload, choice),
        host_bytes=on_host + landing_bytes(workload, choice) + offloaded,
        bytes_to_device=course.up.moved,
        bytes_to_host=course.down.moved,
    )


class _Lane:
    """What does one thing after the other, at so many bytes in a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = 0.0  # when all is done so far
        self.busy = 0.0  # seconds
        self.moved = 0  # bytes

    def take(self, seconds: float, ready: float = 0.0) -> float:
        """Do something that can begin when it is ready; return when it is done."""
        self.free = max(self.free, ready) + seconds
        self.busy += seconds
        return self.free

    def move(self, nbytes: int, ready: float = 0.0) -> float:
        """The same, of so many bytes."""
        self.moved += nbytes
        return self.take(nbytes / self.rate, ready)

    def count(self, nbytes: int) -> None:
        """Count bytes that are moved beside all else."""
        self.moved += nbytes
        self.busy += nbytes / self.rate


class _Course:
    """A step on a machine; see [Note: the time of a step]. What is resident has the number after the last unit."""

    def __init__(self, workload: Workload, machine: Machine, choice: Choice) -> None:
        self._workload = workload
        self._machine = machine
        self._slots = choice.k
        self._units = workload.everything
        last = len(workload.units)
        self._in_order = range(last)
        self._living, self._visiting = set(choice.living), set(choice.visiting)
        self._streams = [number < last and number not in self._living for number in range(last + 1)]
        self._ways = choice.ways or tuple(unit.ways[0] for unit in workload.units)
        self._leaving = [*(way.leaving for way in self._ways[:-1]), 0]
        self._gradients = [workload.gradient_to_host(number, choice) for number in range(last + 1)]
        self._compute, self._host = _Lane(1.0), _Lane(machine.host)
        self.up, self.down = _Lane(machine.to_device), _Lane(machine.to_host)
        self._device = _Lane(machine.device)
        self._on_host = [
            number
            for number, unit in enumerate(self._units)
            if unit.step_bytes and number not in self._living and number not in self._visiting
        ]
        self._visited = 0.0  # when the last visit will be over
        # of adding up gradients on the host
        gradients = sum(unit.gradient_bytes for unit in self._units)
        self.add_seconds = workload.add_seconds * sum(self._gradients) / max(1, gradients)
        self.lanes = {
            Lane.COMPUTE: self._compute,
            Lane.TO_DEVICE: self.up,
            Lane.TO_HOST: self.down,
            Lane.VISIT: self._device,
            Lane.HOST: self._host,
        }

    def run(self, steps: bool) -> float:
        """Run through a backward and the forward after it, with a step of the optimizer between them or without."""
        for lane in self.lanes.values():
            lane.free = 0.0
        self._visited = 0.0
        before = (self.up.moved, self.down.moved)
        # when each unit has been stepped, or may be by its visit
        ready = [0.0 if streams else math.inf for streams in self._streams]
        on_host = sum(self._units[number].step_bytes for number in self._on_host) if steps else 0
        if self._workload.trains:
            come = self._run_backward(steps, ready)
            steps_meanwhile = steps and self._workload.stepping == "in backward"
            self._compute.take(0.0, self._copying_seconds(before, on_host if steps_meanwhile else 0))
            if steps:
                self._step(come, ready)
        self._compute.take(self._workload.rest_seconds)
        self._run_forward(steps, ready)
        return max(self._compute.free, self._copying_seconds(before, on_host))

    def _copying_seconds(self, before: tuple[int, int], stepped: int) -> float:
        """Return how long copies since then keep what they share busy: the link, and the memory of the host.

        Its steps, of so many bytes, leave to copies what they do not use of it, or these wait for their end.
        """
        machine = self._machine
        up, down = self.up.moved - before[0], self.down.moved - before[1]
        in_memory = (up + down + stepped) / machine.host_memory
        if stepped and machine.host_memory > machine.host:
            in_memory = min(in_memory, (up + down) / (machine.host_memory - machine.host))
        return max(up / machine.to_device, down / machine.to_host, (up + down) / machine.both, in_memory)

    def _run_backward(self, steps: bool, ready: list[float]) -> list[float]:
        """Run through a backward, and visits in it; return when each unit's gradients have come."""
        visiting: list[int] = []
        if steps and self._workload.stepping == "in backward":
            visiting = sorted(self._visiting, reverse=True)
        freed: list[float] = []  # when the places of units were, in the order in which they stream
        sent = [0.0] * STAGING_BUFFERS
        begun = 0.0
        come = [0.0] * len(self._units)
        for number in (*reversed(self._in_order), len(self._in_order)):
            unit = self._units[number]
            arrived = 0.0
            if self._streams[number] and len(freed) >= self._slots:
                arrived = self.up.move(unit.weight_bytes, freed[-self._slots])
            if number < len(self._in_order):
                if self._leaving[number]:
                    arrived = self.up.move(self._leaving[number], begun)
                begun = max(self._compute.free, arrived)
                self._compute.take(self._ways[number].repeating + unit.backward_seconds, arrived)
            come[number] = self._compute.free
            if self._gradients[number]:
                self._compute.take(0.0, sent[-STAGING_BUFFERS])
                come[number] = self.down.move(self._gradients[number], self._compute.free)
                sent.append(come[number])
            if self._streams[number]:
                freed.append(self._compute.free)
        for number in visiting:
            ready[number] = self._visit(self._units[number], come[number])
        return come

    def _visit(self, unit: UnitWork, ready: float) -> float:
        """Have a unit visit; return when it is over."""
        # gradients that were added up lie on the host
        up = unit.visit_up if self._workload.gradients_stay else unit.visit_up + unit.gradient_bytes
        begin = max(ready, self._visited)
        self._visited = begin + self._machine.visit(up, unit.visit_down)
        for lane, nbytes in ((self.up, up), (self.down, unit.visit_down), (self._device, up + unit.visit_down)):
            lane.count(nbytes)
        return self._visited

    def _step(self, come: list[float], ready: list[float]) -> None:
        """Have the host step units; of those whose gradients have come the first one that the next forward needs."""
        if self._workload.stepping == "after backward":
            come = [max(come)] * len(come)
        adding = self.add_seconds / max(1, sum(self._units[number].step_bytes for number in self._on_host))
        # what is resident is needed first
        coming = sorted((come[number], (number + 1) % len(come)) for number in self._on_host)
        waiting: list[int] = []
        while coming or waiting:
            if not waiting:
                self._host.take(0.0, coming[0][0])
            while coming and coming[0][0] <= self._host.free:
                heappush(waiting, coming.pop(0)[1])
            number = (heappop(waiting) - 1) % len(come)
            self._host.move(self._units[number].step_bytes)
            ready[number] = self._host.take(adding * self._units[number].step_bytes)
        for number in self._visiting if self._workload.stepping != "in backward" else ():
            ready[number] = max(come)

    def _run_forward(self, steps: bool, ready: list[float]) -> None:
        """Run through a forward, in which units wait for their steps, and visits bring them."""
        streamed = sum(self._streams)
        # of the streamed units, those that forward finds on the device
        staying = range(0 if self._workload.trains else max(0, streamed - self._slots), self._slots)
        if steps:
            living = sum(self._units[number].step_bytes for number in self._living)
            self._compute.take(living / self._machine.device)
        freed: list[float] = []
        left = 0.0
        for number in (len(self._in_order), *self._in_order):
            unit = self._units[number]
            # the lane has nothing to do before one of those that are left has been stepped; others do not wait for it
            begin = min(ready[number % len(self._in_order) :])
            is_there = not self._streams[number] or len(freed) in staying
            if not is_there and len(freed) >= self._slots:
                begin = max(begin, freed[-self._slots])
            arrived = 0.0
            is_brought = steps and number in self._visiting and self._workload.stepping != "in backward"
            nbytes = 0 if is_there else unit.weight_bytes
            if is_brought:
                nbytes = max(0, nbytes - unit.bytes_after_step)
                arrived = self._visit(unit, max(begin, ready[number], self.up.free))
                self.up.free = arrived
            elif is_there and steps and number not in self._living:
                nbytes = unit.bytes_after_step
            if nbytes:
                loaded = self.up.move(nbytes, begin)
                arrived = max(arrived, loaded, ready[number] + nbytes / self._machine.to_device)
            if number == len(self._in_order):  # what is resident
                self._compute.take(0.0, arrived)
                continue
            self._compute.take(unit.forward_seconds, arrived)
            self._compute.take(0.0, left)
            if self._workload.trains and self._leaving[number]:
                left = self.down.move(self._leaving[number], self._compute.free)
            if self._streams[number]:
                freed.append(self._compute.free)
