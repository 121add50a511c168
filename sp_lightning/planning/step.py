"""The time of a step, in closed form, and all else that is predicted of it with a given choice.

[Note: the time of a step]
Computing, copies in both directions and work on the host go on side by side, so each phase of a step takes as long as
its busiest lane:

    forward     weights are sent, activations leave
    backward    weights and activations are sent, gradients leave; nothing leaves before the first unit has computed
    turn        from backward to the next forward, one after the other, as nothing hides it: the gradients of the unit
                that backward ends with leave, are stepped, and come back as weights
    host        from the first gradients of backward, through the steps of all units, to the last one's next forward

Units are followed one by one where they wait for each other (`_Course`): a load for a place, computing for a load.
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

from collections.abc import Iterable, Sequence

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.planning.cost import (
    UNITS_THAT_STAY,
    Choice,
    Machine,
    Prediction,
    UnitWork,
    Way,
    Workload,
    device_bytes,
    landing_bytes,
    leaving_gradients,
    window_of,
)


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

    def send(self, sizes: Iterable[int]) -> None:
        copies = list(sizes)
        self.busy[Lane.TO_DEVICE] += sum(map(self._machine.up, copies))
        self.copied[Lane.TO_DEVICE] += sum(copies)

    def save(self, sizes: Iterable[int]) -> None:
        """Leave out copies to the device that another phase has."""
        copies = list(sizes)
        self.busy[Lane.TO_DEVICE] -= sum(map(self._machine.up, copies))
        self.copied[Lane.TO_DEVICE] -= sum(copies)

    def bring_back(self, sizes: Iterable[int]) -> None:
        copies = list(sizes)
        self.busy[Lane.TO_HOST] += sum(map(self._machine.down, copies))
        self.copied[Lane.TO_HOST] += sum(copies)

    def step_on_host(self, unit: UnitWork) -> None:
        self.busy[Lane.HOST] += self._machine.step(unit)
        self.stepped_bytes += unit.step_bytes

    def visit(self, up: int, down: int) -> None:
        self.send([up])
        self.bring_back([down])
        self.busy[Lane.VISIT] += (up + down) / self._machine.device


class _Course:
    """Units as they compute one after another: each when it is there, and loaded when a place is free for it."""

    def __init__(self, slots: int, begin: float = 0.0) -> None:
        self.computed = begin
        self.sent = 0.0  # when the lane to the device will have nothing more to do
        self.ends: list[float] = []  # when each unit had computed
        self._slots = slots
        self._freed: list[float] = []  # the same, of those that stream

    def add(self, seconds: float, load: float, streams: bool, ready: float = 0.0) -> None:
        """Have a unit compute for so many seconds, once it is ready, and a load has brought it that takes so long.

        A load that waits for the host holds up no other one.
        """
        arrived = ready
        if load:
            begin = self.sent
            if streams and len(self._freed) >= self._slots:
                begin = max(begin, self._freed[-self._slots])
            self.sent = begin + load
            arrived = max(self.sent, ready + load)
        self.computed = max(self.computed, arrived) + seconds
        self.ends.append(self.computed)
        if streams:
            self._freed.append(self.computed)


class _Step:
    """A step of the optimizer with all of its micro-steps; see [Note: the time of a step]."""

    def __init__(self, workload: Workload, machine: Machine, choice: Choice, ways: Sequence[Way]) -> None:
        self._workload = workload
        self._machine = machine
        self._slots = choice.slots
        self._window = window = window_of(workload, choice)
        # the units that forward begins with, and that are there at the turn
        self._first = window.in_order[0], workload.resident
        self._forward = _Phase(machine)
        self._backward = _Phase(machine)
        self._turn = _Phase(machine)
        # once for all micro-steps; what of it sticks out is part of the turn
        self._optimizer = _Phase(machine)
        self._visits = _Phase(machine)
        self._add_computing(ways)
        self._add_loads()
        if workload.trains:
            self._add_activations(ways)
            first, *others, resident = leaving_gradients(workload)
            self._backward.bring_back(others)
            self._turn.bring_back((first, resident))
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
        self._forward.bring_back(leaving)
        self._backward.send(leaving)
        # a unit does not end before the one before it is rid of its activations, nor before they are back again
        for nbytes, way, unit in zip(leaving, ways[1:], self._workload.units[1:], strict=True):
            backward_seconds = unit.backward_seconds + way.repeating
            self._forward.held_up += max(0.0, self._machine.down(nbytes) - unit.forward_seconds)
            self._backward.held_up += max(0.0, self._machine.up(nbytes) - backward_seconds)

    def _add_loads(self) -> None:
        """Add what is sent between two steps of the optimizer; see [Note: loads]."""
        sizes = [unit.weight_bytes for unit in self._window.streamed]
        others = max(0, len(sizes) - self._slots)
        if self._workload.trains:
            self._forward.send(sizes[self._slots :])
            self._backward.send(sizes[:others])
        else:
            alone = range(others, self._slots)  # with their places
            self._forward.send(size for number, size in enumerate(sizes) if number not in alone)

    def _add_steps(self) -> None:
        """Add the steps of all units, and the weights that they have changed where they lie on the device."""
        workload, window = self._workload, self._window
        for unit in (*window.in_order, workload.resident):
            if unit.visit_up:
                self._visits.visit(self._bytes_up(unit), unit.visit_down)
            else:
                self._optimizer.step_on_host(unit)
        sent = [*window.streamed[: self._slots], *window.kept, workload.resident]
        if workload.stepping != "in backward":  # visits bring new weights to the places of their units
            self._visits.save(unit.weight_bytes for unit in window.streamed[self._slots :] if unit.visit_up)
            sent = [unit for unit in sent if not unit.visit_up]
        self._optimizer.send(unit.bytes_after_step for unit in sent)

    def _bytes_up(self, unit: UnitWork) -> int:
        """Return what a visit sends to the device; gradients that were added up lie on the host."""
        return unit.visit_up if self._workload.gradients_stay else unit.visit_up + unit.gradient_bytes

    def lanes(self) -> dict[Lane, float]:
        """Return the seconds of work in each lane."""
        phases = (self._forward, self._backward, self._turn)
        times = self._workload.micro_steps
        lanes = {lane: self._optimizer.busy[lane] + self._visits.busy[lane] for lane in Lane}
        for lane in Lane:
            lanes[lane] += times * sum(phase.busy[lane] for phase in phases)
        lanes[Lane.HOST] += (times - 1) * self._workload.add_seconds
        return lanes

    def copied(self, lane: Lane) -> int:
        """Return the bytes of all copies in a lane."""
        phases = (self._forward, self._backward, self._turn)
        copied = sum(phase.copied[lane] for phase in phases)
        return self._workload.micro_steps * copied + self._optimizer.copied[lane] + self._visits.copied[lane]

    def seconds(self) -> float:
        """Return how long it takes."""
        workload = self._workload
        forward = self._seconds_of_forward()
        backward = self._seconds_of_backward()
        micro_step = forward + backward + workload.rest_seconds
        if not workload.stepping:
            return workload.micro_steps * micro_step
        if workload.stepping == "in backward":
            seconds = self._stepped_in_backward(forward, backward)
        else:
            seconds = backward + self._stepped_under_forward(backward)
        return seconds + (workload.micro_steps - 1) * max(micro_step, workload.add_seconds)

    def _seconds_of_forward(self) -> float:
        """Return how long a forward takes in which no unit waits for a step."""
        window = self._window
        stay = range(self._slots)
        if not self._workload.trains:
            stay = range(max(0, len(window.streamed) - self._slots), self._slots)
        units = list(zip(window.in_order, window.streams, strict=True))
        computed = self._computed(units, [unit.forward_seconds for unit, _ in units], stay)
        phase = self._forward
        leaving = window.in_order[0].forward_seconds + phase.busy[Lane.TO_HOST]
        return max(computed, phase.busy[Lane.COMPUTE] + phase.held_up, leaving, self._shared_seconds(phase))

    def _seconds_of_backward(self) -> float:
        """Return how long a backward takes, without what its end leaves for the turn."""
        window, phase = self._window, self._backward
        if not self._workload.trains:
            return 0.0
        units = list(zip(window.in_order, window.streams, strict=True))[::-1]
        once = sum(unit.backward_seconds for unit, _ in units)
        again = (phase.busy[Lane.COMPUTE] - once) / len(units)
        seconds = [unit.backward_seconds + again for unit, _ in units]
        sent = phase.busy[Lane.TO_DEVICE]
        computed = self._computed(units, seconds, range(self._slots))
        if self._slots == 1:  # activations, too, come in turns with computing
            computed = max(computed, phase.busy[Lane.COMPUTE] + sent)
        elif sent:
            computed = max(computed, seconds[0] + sent + seconds[-1])
        leaving = seconds[0] + phase.busy[Lane.TO_HOST]
        return max(computed, phase.busy[Lane.COMPUTE] + phase.held_up, leaving, self._shared_seconds(phase))

    def _computed(self, units: Sequence[tuple[UnitWork, bool]], seconds: Sequence[float], stay: range) -> float:
        """Return when units have computed for so many seconds each, of which those that stream are loaded.

        Of these, the ones with numbers in `stay` are there already.
        """
        course = _Course(self._slots)
        number = 0
        for (unit, streams), computing in zip(units, seconds, strict=True):
            load = 0.0
            if streams:
                if number not in stay:
                    load = self._machine.up(unit.weight_bytes)
                number += 1
            course.add(computing, load, streams)
        return course.computed

    def _stepped_in_backward(self, forward: float, backward: float) -> float:
        """Return the seconds of a step whose units are stepped as backward has their gradients."""
        machine, workload = self._machine, self._workload
        gone = self._turn.busy[Lane.TO_HOST]
        stepped = sum(machine.step(unit) for unit in self._first if not unit.visit_up)
        sent = sum(machine.up(unit.bytes_after_step) for unit in self._first)
        sending = self._backward.busy[Lane.TO_DEVICE] + self._visits.busy[Lane.TO_DEVICE]
        since_stepping = backward - self._first_gradients()
        others_sent = self._optimizer.busy[Lane.TO_DEVICE] - sent - max(0.0, since_stepping - sending)
        turn = max(gone + stepped, others_sent) + sent
        rest = workload.rest_seconds + self._optimizer.busy[Lane.COMPUTE]
        device = max(backward + max(turn, rest), self._end_of_visits(backward) + sent) + forward
        stepping = workload.add_seconds + self._optimizer.busy[Lane.HOST]
        host = self._first_gradients() + stepping + self._last_forward()
        phases = (self._forward, self._backward, self._turn, self._optimizer, self._visits)
        return max(device, host, self._shared_seconds(*phases))

    def _end_of_visits(self, backward: float) -> float:
        """Return when all visits have ended that begin in a backward of so many seconds."""
        if not self._visits.copied[Lane.TO_HOST]:
            return 0.0
        units = self._window.in_order[::-1]
        pace = backward / max(1e-12, sum(unit.backward_seconds for unit in units))
        computed = visited = 0.0
        for unit in units:
            computed += pace * unit.backward_seconds
            if unit.visit_up:
                visited = max(visited, computed) + self._visit_seconds(unit)
        first = pace * units[0].backward_seconds
        copying = [self._backward.busy[lane] + self._visits.busy[lane] for lane in (Lane.TO_DEVICE, Lane.TO_HOST)]
        return max(visited, first + max(copying), first + self._shared_seconds(self._backward, self._visits))

    def _stepped_under_forward(self, backward: float) -> float:
        """Return how long it takes from the end of backward to the end of the next forward."""
        machine, workload, window = self._machine, self._workload, self._window
        gone = self._turn.busy[Lane.TO_HOST]
        # the part of the host's work that is left at the end of backward: of what has come, it steps the latest first
        left = 1.0
        stepping = workload.add_seconds + self._optimizer.busy[Lane.HOST]
        if workload.stepping == "under forward" and stepping:
            left -= min(1.0, max(0.0, backward - self._first_gradients()) / stepping)
        stepped = workload.add_seconds
        course = _Course(self._slots, begin=workload.rest_seconds + self._optimizer.busy[Lane.COMPUTE])
        number = 0
        for unit, streams in ((workload.resident, False), *zip(window.in_order, window.streams, strict=True)):
            stays = not streams or number < self._slots
            if streams:
                number += 1
            load = machine.up(unit.bytes_after_step if stays else unit.weight_bytes)
            ready = 0.0
            if unit.visit_up:
                load = self._visit_seconds(unit)
                ready = gone
            elif unit.step_bytes:
                stepped += machine.step(unit)
                ready = gone + max(machine.step(unit), left * stepped)
            course.add(unit.forward_seconds, load, streams, ready)
        began = course.ends[1] - window.in_order[0].forward_seconds
        computing = began + self._forward.busy[Lane.COMPUTE] + self._forward.held_up
        leaving = course.ends[1] + self._forward.busy[Lane.TO_HOST]
        coming = gone + self._forward.busy[Lane.TO_HOST] + self._visits.busy[Lane.TO_HOST]
        shared = self._shared_seconds(self._forward, self._optimizer, self._visits)
        return max(course.computed, computing, leaving, coming, gone + shared)

    def _visit_seconds(self, unit: UnitWork) -> float:
        return self._machine.visit(self._bytes_up(unit), unit.visit_down)

    def _shared_seconds(self, *phases: _Phase) -> float:
        """Return how long what lanes share is busy in these phases: the link, and the host's memory."""
        copied = sum(sum(phase.copied.values()) for phase in phases)
        stepped = sum(phase.stepped_bytes for phase in phases)
        return max(copied / self._machine.both, (copied + stepped) / self._machine.host_memory)

    def _first_gradients(self) -> float:
        """Return when in backward the host has the first gradients: those of the last unit."""
        last = self._window.in_order[-1]
        return last.backward_seconds + self._machine.down(last.gradient_bytes)

    def _last_forward(self) -> float:
        """Return what the last unit, which is stepped last, has to do then."""
        last = self._window.in_order[-1]
        return self._machine.up(last.weight_bytes) + last.forward_seconds
