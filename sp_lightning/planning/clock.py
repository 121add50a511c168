"""The time of a step: its lanes run once through it, unit by unit, from one backward to the next.

[Note: the time of a step]
Computing, copies in both directions and work on the host run side by side. Each lane does one thing after the other, as
soon as everything that this waits for is done:

    a load         a free place, and, after a step of the optimizer, the unit's new weights on the host
    computing      the unit's weights, and its activations if they wait on the host
    gradients      one of two buffers on the device, so computing waits for the copy before the last one
    steps          their gradients or, clipped, those of all units; of several that could begin, the first unit's; those
                   whose state is on a drive pass through it one after the other, beside the others on the host
    visits         the same, and the visit before; after backward or deferred, the moment at which their unit is loaded

Copies up and down share the link; all copies and the steps on the host share the host's memory. No part of a step takes
less time than the bytes that they have to move there.

[Note: loads]
If k of N units fit into the window, the last k stay there for backward, and the first k after it: N - k are sent in
backward, and N - k in forward. After a step, units that stayed are sent again. If a visit brings a unit's new weights
as it is loaded, only the others are sent. Units that all have a place of their own (k >= N) are sent as they are
updated, so in backward the first ones come last. In inference the first ones do not stay: all are sent, except for
those that share their place with no other.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass

from sp_lightning.pipeline.gradients.gradient_memory import FEW_BUFFERS, landing_buffers
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS
from sp_lightning.planning.memory import device_bytes, host_bytes, state_bytes
from sp_lightning.planning.work import Choice, Machine, Prediction, Workload

# the part of computing that is limited by the device's memory, which others take from it
_WAITS_FOR_MEMORY = 0.5


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict the costs of a step with a choice."""
    passes = [_Pass(workload, machine, choice, steps=workload.stepping is not None)]
    if workload.micro_steps > 1:
        passes += [_Pass(workload, machine, choice, steps=False)] * (workload.micro_steps - 1)
    return Prediction(
        choice,
        seconds=sum(each.seconds for each in passes),
        lanes={lane: sum(each.lanes[lane].busy for each in passes) for lane in passes[0].lanes},
        device_bytes=device_bytes(workload, choice),
        host_bytes=host_bytes(workload, choice),
        bytes_to_device=int(sum(each.up.moved for each in passes)),
        bytes_to_host=int(sum(each.down.moved for each in passes)),
        bytes_to_drive=state_bytes(workload, choice.on_drive),
    )


@dataclass
class _Lane:
    """A resource that does one thing after the other, at a rate."""

    rate: float
    free: float = 0.0  # when all is done so far
    moved: float = 0.0  # the sum of bytes, or of seconds of computing

    @property
    def busy(self) -> float:
        """The seconds that it has worked."""
        return self.moved / self.rate

    def move(self, amount: float, ready: float = 0.0) -> float:
        """Do something that can begin when it is ready; return when it is done."""
        self.free = max(self.free, ready) + amount / self.rate
        self.moved += amount
        return self.free


class _Pass:
    """A backward and the forward after it, with a step of the optimizer between them or without one.

    See [Note: the time of a step]. The resident unit has the number after the last one.
    """

    def __init__(self, workload: Workload, machine: Machine, choice: Choice, steps: bool) -> None:
        self._workload = workload
        self._machine = machine
        self._choice = choice
        self._slots = choice.k
        self._steps = steps
        self._units = workload.everything
        self._resident = len(workload.units)
        self._kept_on_host = workload.kept_on_host(choice)
        self._streams = [number in self._kept_on_host for number in range(self._resident)] + [False]
        self._ways = workload.ways(choice)
        self._leaving = [*(way.leaving for way in self._ways[:-1]), 0, 0]
        self._gradients = workload.gradients_to_host(choice)
        self._waiting = set(choice.waiting)
        # the bytes of the steps on the host
        self._on_host = {
            number: unit.step_bytes
            for number, unit in self._kept_on_host.items()
            if steps and unit.step_bytes and number not in choice.visiting
        }
        self._on_drive = self._on_host.keys() & set(choice.on_drive)
        self._landing = landing_buffers(sum(unit.weight_bytes > 0 for unit in self._units))
        # a drive writes state into this memory, and reads it
        self._bytes_on_host = sum(self._on_host.values()) + 2 * state_bytes(workload, self._on_drive)
        self._steps_in_backward = steps and workload.stepping == "in backward"
        # units that visit in backward, and those that the next forward has visit
        self._early = [*choice.visiting] if self._steps_in_backward and not choice.defers_visits else []
        self._visiting = choice.visiting if steps and not self._early else ()
        self._visited = 0.0  # when the last visit will be over
        self._come = [0.0] * len(self._units)  # when each unit's gradients have come
        # when each unit has been stepped, or may be by its visit
        self._ready = [0.0 if streams else math.inf for streams in self._streams]
        self._compute, self._drive = _Lane(1.0), _Lane(machine.drive)
        # the part of the host that steps of units on the drive take from others; all together are no faster than it
        self._beside = 0.0
        self._host, self._together = _Lane(machine.host), _Lane(machine.host)
        self._slower = self._slowed()
        self.up, self.down = _Lane(machine.to_device), _Lane(machine.to_host)
        self.lanes = {
            Lane.COMPUTE: self._compute,
            Lane.TO_DEVICE: self.up,
            Lane.TO_HOST: self.down,
            Lane.HOST: self._host,
            Lane.TO_DRIVE: self._drive,
        }
        self.seconds = self._run()

    def _run(self) -> float:
        """Run through it; return when it is over."""
        if self._workload.trains:
            self._run_backward()
            # it adds up gradients as they come
            every = max(1, sum(unit.gradient_bytes for unit in self._units))
            self._host.free = self._workload.add_seconds * sum(self._gradients) / every
            self._compute.move(self._workload.traffic_of_gradients(self._choice) / self._machine.device_memory)
            # these visits crowd its copies; forward need not wait for others
            self._visit_in_backward(self._compute.free)
            self._compute.move(0.0, self._copying_seconds(self._bytes_on_host * self._steps_in_backward))
            self._step()
            self._visit_in_backward(math.inf)
        self._compute.move(self._workload.rest_seconds)
        self._run_forward()
        stepped = max(self._host.free, self._drive.free)
        return max(self._compute.free, stepped, self._copying_seconds(self._bytes_on_host))

    def _slowed(self) -> float:
        """Return how much longer computing takes because copies and updates take some of the device's memory."""
        computing = sum(unit.forward_seconds + unit.backward_seconds for unit in self._units)
        moved = sum(self._gradients) + 2 * sum(self._leaving)
        for number, unit in self._kept_on_host.items():
            moved += unit.weight_bytes * (1 + self._workload.trains) * self._streams[number]
            if self._steps and number in self._choice.visiting:
                moved += unit.visit_up + unit.visit_down + unit.visit_traffic
        return 1 + _WAITS_FOR_MEMORY * moved / self._machine.device_memory / max(computing, 1e-9)

    def _copying_seconds(self, stepped: int) -> float:
        """Return how long all copies so far keep their shared resources busy: the link, and the memory of the host.

        Steps on the host, of `stepped` bytes, leave the rest of the memory's bandwidth to copies, or copies wait.
        """
        machine = self._machine
        up, down = self.up.moved, self.down.moved
        in_memory = (up + down + stepped) / machine.host_memory
        if stepped and machine.host_memory > machine.host:
            in_memory = min(in_memory, (up + down) / (machine.host_memory - machine.host))
        return max(up / machine.to_device, down / machine.to_host, (up + down) / machine.both, in_memory)

    def _run_backward(self) -> None:
        """Run through a backward, and visits in it."""
        # when the places of units were freed, in the order in which they stream
        freed: list[float] = []
        sent = [0.0] * STAGING_BUFFERS
        stepped = [0.0] * self._landing
        begun = 0.0
        for number in (*reversed(range(self._resident)), self._resident):
            unit = self._units[number]
            arrived = 0.0
            if self._streams[number] and len(freed) >= self._slots:
                arrived = self.up.move(unit.weight_bytes, freed[-self._slots])
            if number < self._resident:
                if self._leaving[number]:
                    arrived = self.up.move(self._leaving[number], begun)
                begun = max(self._compute.free, arrived)
                seconds = self._ways[number].repeating + self._slower * unit.backward_seconds
                self._compute.move(seconds, arrived)
            self._come[number] = self._compute.free
            if self._gradients[number]:
                self._compute.move(0.0, max(sent[-STAGING_BUFFERS], stepped[-self._landing]))
                self._come[number] = self.down.move(self._gradients[number], self._compute.free)
                sent.append(self._come[number])
                # how many have been stepped does not depend on their order
                if self._steps_in_backward and self._on_drive and number in self._on_host:
                    insort(stepped, self._update(number))
            if self._streams[number]:
                freed.append(self._compute.free)
        for lane in (self._host, self._drive, self._together):
            lane.free = lane.moved = 0.0

    def _visit_in_backward(self, until: float) -> None:
        """Have units visit as their gradients come, as long as these visits end before a moment."""
        while self._early:
            number = self._early[-1]
            unit = self._units[number]
            if max(self._visited, self._come[number]) + self._machine.visit(unit, unit.visit_up) > until:
                break
            self._early.pop()
            self._ready[number] = self._visit(number, self._come[number])
            if not self._early:
                # by then, backward's copies have taken their part, too
                self._ready[number] = max(self._ready[number], self._copying_seconds(self._bytes_on_host))

    def _visit(self, number: int, ready: float) -> float:
        """Have a unit visit; return when it is over."""
        unit, machine = self._units[number], self._machine
        # gradients that were added up lie on the host, unless they wait on the device
        is_there = self._workload.gradients_stay or number in self._waiting
        up = unit.visit_up if is_there else unit.visit_up + unit.gradient_bytes
        begin, seconds = max(ready, self._visited), machine.visit(unit, up)
        # beside steps on the host, copies have what these leave of its memory
        left = max(machine.host_memory - machine.host, machine.host_memory / 4)
        stepped = max(self._host.free, self._bytes_on_host / machine.host)
        self._visited = max(begin + seconds, min(begin + (up + unit.visit_down) / left, stepped))
        self.up.moved += up
        self.down.moved += unit.visit_down
        return self._visited

    def _step(self) -> None:
        """Have the host step units: first, among those whose gradients have come, the one that forward needs first."""
        if self._steps:
            updated = sum(unit.update_traffic for unit in self._workload.numbered(self._choice.living))
            self._compute.move(updated / self._machine.device_memory)
        if self._workload.stepping == "after backward":
            self._come = [max(self._come)] * len(self._come)
        for number in self._visiting:
            self._ready[number] = self._come[number] if self._steps_in_backward else max(self._come)
        # gradients that have waited on the device come through few buffers, each freed by a step
        # the next one is last
        late = sorted(self._waiting & self._on_host.keys(), reverse=not self._steps_in_backward)
        ready = [*self._come]
        for number in late[:-FEW_BUFFERS]:
            self._come[number] = math.inf
        for number in reversed(late[-FEW_BUFFERS:]):
            self._come[number] = self.down.move(self._workload.bytes_that_wait(number), ready[number])
        del late[-FEW_BUFFERS:]
        # the resident unit is first
        waiting = {number: (number + 1) % len(self._come) for number in self._on_host}
        while waiting:
            number = min(waiting, key=lambda each: (max(self._lane_of(each).free, self._come[each]), waiting[each]))
            del waiting[number]
            stepped = self._ready[number] = self._update(number)
            if number in self._waiting and late:
                follows = late.pop()
                begin = max(stepped, ready[follows])
                self._come[follows] = self.down.move(self._workload.bytes_that_wait(follows), begin)

    def _lane_of(self, number: int) -> _Lane:
        """Return the lane in which a unit is stepped on the host."""
        return self._drive if number in self._on_drive else self._host

    def _update(self, number: int) -> float:
        """Have the host step a unit whose gradients have come; return when it is over."""
        lane, nbytes, come = self._lane_of(number), self._on_host[number], self._come[number]
        seconds = alone = nbytes / self._machine.host
        if number in self._on_drive:  # the slower one of drive and host keeps the other one waiting
            seconds = max(alone, self._units[number].state_bytes / lane.rate)
            self._beside = min(0.5, alone / seconds)
        else:
            crowded = min(self._drive.free - max(lane.free, come), alone / (1 - self._beside))
            seconds += max(0.0, crowded) * self._beside
        lane.free = max(lane.move(seconds * lane.rate, come), self._together.move(nbytes, come))
        return lane.free

    def _bring(self, number: int, begin: float, nbytes: int) -> float:
        """Send a unit, from a moment on, or have its visit bring the new weights; return when it has arrived."""
        unit, arrived = self._units[number], 0.0
        if number in self._visiting:
            nbytes = max(0, nbytes - unit.bytes_after_step)
            arrived = self._visit(number, max(begin, self._ready[number], self.up.free))
            self.up.free = arrived
        if nbytes:
            loaded = self.up.move(nbytes, begin)
            arrived = max(arrived, loaded, self._ready[number] + nbytes / self._machine.to_device)
        return arrived

    def _bring_at_once(self) -> list[float]:
        """Send units that have places of their own as they are stepped; return when each has arrived."""
        arrived = [0.0] * len(self._units)
        for number in sorted(self._kept_on_host, key=self._ready.__getitem__):
            if nbytes := self._units[number].bytes_after_step:
                arrived[number] = self._bring(number, self._ready[number], nbytes)
        return arrived

    def _run_forward(self) -> None:
        """Run through a forward, in which units wait for their steps, and visits bring them."""
        streamed = sum(self._streams)
        # the streamed units that forward finds on the device
        staying = range(0 if self._workload.trains else max(0, streamed - self._slots), self._slots)
        brought = self._bring_at_once() if self._steps and streamed <= self._slots else None
        freed: list[float] = []
        left = 0.0
        for number in (self._resident, *range(self._resident)):
            unit = self._units[number]
            # the lane is idle until one of the remaining units has been stepped; others do not wait for it
            begin = min(self._ready[number % max(1, self._resident) :])
            is_there = not self._streams[number] or len(freed) in staying
            nbytes = 0
            if not is_there:
                nbytes = unit.weight_bytes
                if len(freed) >= self._slots:
                    begin = max(begin, freed[-self._slots])
            elif self._steps and number in self._kept_on_host:
                nbytes = unit.bytes_after_step
            arrived = self._bring(number, begin, nbytes) if brought is None else brought[number]
            self._compute.move(self._slower * unit.forward_seconds, arrived)
            self._compute.move(0.0, left)
            if self._leaving[number]:
                left = self.down.move(self._leaving[number], self._compute.free)
            if self._streams[number]:
                freed.append(self._compute.free)
