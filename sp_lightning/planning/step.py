"""The time of a step, in closed form, and all else that is predicted of it with a given choice.

[Note: the time of a step]
Computing, copies in both directions and work on the host go on side by side, so each phase of a step takes as long as
its busiest lane:

    forward     weights are sent, activations leave
    backward    weights and activations are sent, gradients leave; nothing leaves before the first unit has computed
    turn        from backward to the next forward, one after the other, as nothing hides it: the gradients of the unit
                that backward ends with leave, are stepped, and come back as weights
    host        from the first gradients of backward, through the steps of all units, to the last one's next forward

Units are followed one by one where they wait for each other (`Course`): a load for a place, computing for a load.
Two lanes more are shared: the link by copies up and down, the host's memory by all copies and the steps on the host.

A unit is stepped on the host, or where it lives, or it visits. If units are stepped as gradients come, those that were
stepped while they lay on the device are sent while backward leaves time for copies, and the rest of them in the turn.
Otherwise each unit is ready for the next forward when the host has stepped it and all before it, or when its visit, in
its turn among copies to the device, has brought new weights to its place.

[Note: loads]
Of N units, of which k fit into the window, the last k stay there for backward, and the first k after it:
N - k are sent in backward, and N - k in forward. After a step, what stayed is sent again, as are units that are kept.
A unit that visits after backward is not sent. In inference the first ones do not stay: all are sent, but for those that
share their place with no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.planning.cost import UNITS_THAT_STAY, Choice, Machine, Prediction, UnitWork, Way, Workload
from sp_lightning.planning.memory import device_bytes, landing_bytes, leaving_gradients
from sp_lightning.planning.travel import Course, window_of


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step takes with a choice."""
    return predict_placed(workload.placed(choice), machine, choice)


def predict_placed(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step of a workload takes from which the choice has taken what lives on the device."""
    ways = choice.ways or tuple(unit.ways[0] for unit in workload.units)
    step = _Step(workload, machine, choice, ways)
    offloaded = sum(way.leaving for way in ways)
    masters_and_state = sum(unit.host_bytes for unit in workload.everything)
    return Prediction(
        choice,
        seconds=step.seconds(),
        lanes=step.lanes(),
        device_bytes=device_bytes(workload, choice, ways),
        host_bytes=masters_and_state + landing_bytes(workload, choice.k_prime) + offloaded,
        bytes_to_device=step.copied(Lane.TO_DEVICE),
        bytes_to_host=step.copied(Lane.TO_HOST),
    )


class _Phase:
    """What each lane has to do in a phase of a step: seconds, bytes of copies, and of host memory."""

    def __init__(self, machine: Machine) -> None:
        self.busy = dict.fromkeys(Lane, 0.0)
        self.copied = dict.fromkeys(Lane, 0)
        # seconds that computing waits for copies of activations, of units that are uneven
        self.held_up = 0.0
        self.stepped_bytes = 0  # of host memory, that steps there read and write
        self._machine = machine

    def send(self, *sizes: int) -> None:
        self.busy[Lane.TO_DEVICE] += sum(map(self._machine.up, sizes))
        self.copied[Lane.TO_DEVICE] += sum(sizes)

    def leave_out(self, nbytes: int) -> None:
        """Take back a copy to the device that another phase has."""
        self.busy[Lane.TO_DEVICE] -= self._machine.up(nbytes)
        self.copied[Lane.TO_DEVICE] -= nbytes

    def bring_back(self, *sizes: int) -> None:
        self.busy[Lane.TO_HOST] += sum(map(self._machine.down, sizes))
        self.copied[Lane.TO_HOST] += sum(sizes)

    def step_on_host(self, unit: UnitWork) -> None:
        self.busy[Lane.HOST] += self._machine.step(unit)
        self.stepped_bytes += unit.step_bytes

    def visit(self, up: int, down: int) -> None:
        self.send(up)
        self.bring_back(down)
        self.busy[Lane.VISIT] += (up + down) / self._machine.device


class _Step:
    """A step of the optimizer with all of its micro-steps; see [Note: the time of a step]."""

    def __init__(self, workload: Workload, machine: Machine, choice: Choice, ways: Sequence[Way]) -> None:
        self._workload = workload
        self._machine = machine
        self._slots = choice.slots
        self._k_prime = choice.k_prime
        self._window = window_of(workload, choice)
        streamed = len(self._window.streamed)
        # of the streamed units, those that forward finds on the device
        self._staying = range(0 if workload.trains else max(0, streamed - self._slots), self._slots)
        self._forward = _Phase(machine)
        self._backward = _Phase(machine)
        # once for all micro-steps
        self._optimizer = _Phase(machine)
        self._visits = _Phase(machine)
        self._turn = 0.0  # from the end of backward until all gradients are gone
        self._add_computing(ways)
        self._add_loads()
        if workload.trains:
            self._add_activations(ways)
            gradients = leaving_gradients(workload)
            self._backward.bring_back(*gradients)
            self._turn = machine.down(gradients[0]) + machine.down(gradients[-1])
        if workload.stepping:
            self._add_steps()

    def _add_computing(self, ways: Sequence[Way]) -> None:
        units = self._workload.units
        self._forward.busy[Lane.COMPUTE] = sum(unit.forward_seconds for unit in units)
        if self._workload.trains:
            again = sum(way.repeating for way in ways)
            self._backward.busy[Lane.COMPUTE] = sum(unit.backward_seconds for unit in units) + again
        self._optimizer.busy[Lane.COMPUTE] = self._workload.on_device_step_bytes / self._machine.device

    def _add_activations(self, ways: Sequence[Way]) -> None:
        leaving = [way.leaving for way in ways[:-UNITS_THAT_STAY]]
        if not any(leaving):
            return
        self._forward.bring_back(*leaving)
        self._backward.send(*leaving)
        # a unit does not end before the one before it is rid of its activations, nor before they are back again
        for nbytes, way, unit in zip(leaving, ways[1:], self._workload.units[1:], strict=True):
            backward_seconds = unit.backward_seconds + way.repeating
            self._forward.held_up += max(0.0, self._machine.down(nbytes) - unit.forward_seconds)
            self._backward.held_up += max(0.0, self._machine.up(nbytes) - backward_seconds)

    def _add_loads(self) -> None:
        """Add what is sent between two steps of the optimizer; see [Note: loads]."""
        sizes = [unit.weight_bytes for unit in self._window.streamed]
        self._forward.send(*(size for number, size in enumerate(sizes) if number not in self._staying))
        if self._workload.trains:
            self._backward.send(*sizes[: max(0, len(sizes) - self._slots)])

    def _add_steps(self) -> None:
        """Add the steps of all units, and the weights that they have changed where they lie on the device."""
        workload, window = self._workload, self._window
        for unit in (workload.resident, *window.in_order):
            if unit.visit_up:
                self._visits.visit(self._bytes_up(unit), unit.visit_down)
            else:
                self._optimizer.step_on_host(unit)
        for unit in filter(self._is_brought, window.streamed[self._slots :]):
            self._visits.leave_out(unit.weight_bytes)
        for unit in (workload.resident, *window.kept, *window.streamed[: self._slots]):
            if not self._is_brought(unit):
                self._optimizer.send(unit.bytes_after_step)

    def _is_brought(self, unit: UnitWork) -> bool:
        """Tell whether a visit brings new weights to the unit's place: as it is loaded for the next forward."""
        return unit.visit_up > 0 and self._workload.stepping != "in backward"

    def _bytes_up(self, unit: UnitWork) -> int:
        """Return what a visit sends to the device; gradients that were added up lie on the host."""
        return unit.visit_up if self._workload.gradients_stay else unit.visit_up + unit.gradient_bytes

    def _visit_seconds(self, unit: UnitWork) -> float:
        return self._machine.visit(self._bytes_up(unit), unit.visit_down)

    def lanes(self) -> dict[Lane, float]:
        """Return the seconds of work in each lane."""
        times = self._workload.micro_steps
        lanes = {}
        for lane in Lane:
            micro_step = self._forward.busy[lane] + self._backward.busy[lane]
            lanes[lane] = times * micro_step + self._optimizer.busy[lane] + self._visits.busy[lane]
        lanes[Lane.HOST] += (times - 1) * self._workload.add_seconds
        return lanes

    def copied(self, lane: Lane) -> int:
        """Return the bytes of all copies in a lane."""
        micro_step = self._forward.copied[lane] + self._backward.copied[lane]
        return self._workload.micro_steps * micro_step + self._optimizer.copied[lane] + self._visits.copied[lane]

    # ------------------------------------------------------------------------------------------------ how long it takes

    def seconds(self) -> float:
        """Return how long it takes."""
        workload = self._workload
        backward = self._seconds_of_backward()
        loads = self._loads(self._in_forward, self._staying)
        unchanged = self._end_of_forward(Course(self._slots), loads, [0.0] * len(loads))
        forward = max(unchanged, self._shared_seconds(self._forward))
        micro_step = forward + backward + workload.rest_seconds
        if not workload.stepping:
            return workload.micro_steps * micro_step
        others = max(micro_step, workload.add_seconds)
        return self._seconds_with_steps(backward, loads) + (workload.micro_steps - 1) * others

    @property
    def _in_forward(self) -> list[tuple[UnitWork, bool]]:
        """What is resident, and the units as they travel: each, and whether it streams."""
        window = self._window
        return [(self._workload.resident, False), *zip(window.in_order, window.streams, strict=True)]

    def _loads(self, units: Sequence[tuple[UnitWork, bool]], staying: range) -> list[float]:
        """Return what it takes to load each unit; of those that stream, some are there."""
        loads = []
        number = 0
        for unit, streams in units:
            is_there = not streams or number in staying
            loads.append(0.0 if is_there else self._machine.up(unit.weight_bytes))
            number += streams
        return loads

    def _seconds_of_backward(self) -> float:
        """Return how long a backward takes, without what its end leaves for the turn."""
        phase = self._backward
        if not self._workload.trains:
            return 0.0
        units = self._in_forward[:0:-1]
        again = (phase.busy[Lane.COMPUTE] - sum(unit.backward_seconds for unit, _ in units)) / len(units)
        seconds = [unit.backward_seconds + again for unit, _ in units]
        course = Course(self._slots)
        loads = self._loads(units, range(self._slots))
        for (_, streams), computing, load in zip(units, seconds, loads, strict=True):
            course.add(computing, load, streams)
        sent = phase.busy[Lane.TO_DEVICE]
        coming = 0.0
        if self._slots == 1:  # activations, too, come in turns with computing
            coming = phase.busy[Lane.COMPUTE] + sent
        elif sent:
            coming = seconds[0] + sent + seconds[-1]
        leaving = seconds[0] + phase.busy[Lane.TO_HOST] - self._turn
        computing = phase.busy[Lane.COMPUTE] + phase.held_up
        return max(course.computed, coming, computing, leaving, self._shared_seconds(phase))

    def _seconds_with_steps(self, backward: float, loads: Sequence[float]) -> float:
        """Return how long a backward of so many seconds and a forward take, in which units wait for their steps."""
        workload = self._workload
        is_in_backward = workload.stepping == "in backward"
        ready = self._stepped(backward)
        waits = list(loads)
        for number, (unit, _) in enumerate(self._in_forward):
            sending = self._machine.up(unit.bytes_after_step)
            if self._is_brought(unit):
                waits[number] = self._visit_seconds(unit)
            elif is_in_backward and not loads[number]:
                ready[number] += sending
            elif not loads[number]:
                waits[number] = sending
        begin = backward + workload.rest_seconds + self._optimizer.busy[Lane.COMPUTE]
        phases = self._forward, self._optimizer, self._visits
        if not is_in_backward:
            gone = backward + self._turn
            coming = self._forward.busy[Lane.TO_HOST] + self._visits.busy[Lane.TO_HOST]
            forward = self._end_of_forward(Course(self._slots, begin, backward), waits, ready)
            return max(forward, gone + coming, gone + self._shared_seconds(*phases))
        # backward leaves time for copies of what has been stepped
        last = self._window.in_order[-1]
        since_stepping = backward - last.backward_seconds - self._machine.down(last.gradient_bytes) / self._k_prime
        sending = self._backward.busy[Lane.TO_DEVICE] + self._visits.busy[Lane.TO_DEVICE]
        sent = backward + self._optimizer.busy[Lane.TO_DEVICE] - max(0.0, since_stepping - sending)
        forward = self._end_of_forward(Course(self._slots, max(begin, sent), sent), waits, ready)
        return max(forward, self._shared_seconds(self._backward, *phases))

    def _end_of_forward(self, course: Course, loads: Sequence[float], ready: Sequence[float]) -> float:
        """Return when a forward ends whose units are loaded when they are ready."""
        phase = self._forward
        ends = []
        for (unit, streams), load, moment in zip(self._in_forward, loads, ready, strict=True):
            course.add(unit.forward_seconds, load, streams, moment)
            ends.append(course.computed)
        first = self._window.in_order[0].forward_seconds
        computing = ends[1] - first + phase.busy[Lane.COMPUTE] + phase.held_up
        return max(course.computed, computing, ends[1] + phase.busy[Lane.TO_HOST])

    def _stepped(self, backward: float) -> list[float]:
        """Return when each unit has been stepped, or its visit can begin that brings it: what is resident first.

        Of the units whose gradients have come, the host steps the first ones first.
        """
        workload, machine = self._workload, self._machine
        units = [unit for unit, _ in self._in_forward]
        ready = [0.0] * len(units)
        pace = backward / max(1e-12, sum(unit.backward_seconds for unit in units))
        slower = 1 + workload.add_seconds / max(1e-12, self._optimizer.busy[Lane.HOST])
        waiting: list[int] = []
        computed = gone = visited = stepped = 0.0
        for number in reversed(range(len(units))):
            unit = units[number]
            computed += pace * unit.backward_seconds
            stays = unit.visit_up > 0 and workload.gradients_stay
            leaving = 0.0 if stays else machine.down(unit.gradient_bytes)
            gone = max(gone + leaving, computed + leaving / self._k_prime)
            has_come = gone
            if workload.stepping == "after backward":
                has_come = backward + self._turn
            while waiting and stepped < has_come:
                first = heappop(waiting)
                stepped += slower * machine.step(units[first])
                ready[first] = stepped
            if self._is_brought(unit):
                ready[number] = backward + self._turn
            elif unit.visit_up:
                visited = max(visited, computed if stays else gone) + self._visit_seconds(unit)
                ready[number] = visited
            elif unit.step_bytes:
                heappush(waiting, number)
                stepped = max(stepped, has_come) if len(waiting) == 1 else stepped
        while waiting:
            first = heappop(waiting)
            stepped += slower * machine.step(units[first])
            ready[first] = stepped
        if visited:
            ready[0] = max(ready[0], self._end_of_copies(backward))
        return ready

    def _end_of_copies(self, backward: float) -> float:
        """Return when all copies have ended of a backward in which units visit."""
        first = backward * self._window.in_order[-1].backward_seconds
        first /= max(1e-12, sum(unit.backward_seconds for unit in self._window.in_order))
        lanes = (Lane.TO_DEVICE, Lane.TO_HOST)
        copying = [self._backward.busy[lane] + self._visits.busy[lane] for lane in lanes]
        return first + max(*copying, self._shared_seconds(self._backward, self._visits))

    def _shared_seconds(self, *phases: _Phase) -> float:
        """Return how long what lanes share is busy in these phases: the link, and the host's memory."""
        copied = sum(sum(phase.copied.values()) for phase in phases)
        stepped = sum(phase.stepped_bytes for phase in phases)
        return max(copied / self._machine.both, (copied + stepped) / self._machine.host_memory)
