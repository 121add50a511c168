"""The time of a step, in closed form, and all else that is predicted of it with a given choice.

[Note: the time of a step]
Computing, copies in both directions and work on the host go on side by side, so each phase of a step takes as long as
its busiest lane:

    forward     weights are sent, activations leave; the first load waits for a place, the last unit for its load
    backward    weights and activations are sent, gradients leave; nothing leaves before the first unit has computed
    turn        from backward to the next forward, one after the other, as nothing hides it: the gradients of the unit
                that backward ends with leave, are stepped, and come back as weights
    host        from the first gradients of backward, through the steps of all units, to the last one's next forward

Other units that were stepped while they lay on the device are sent while backward leaves time for copies, and the rest
of them in the turn; in the next forward if nothing is stepped before backward has ended. With a single slot, computing
and copies of weights take turns. Each way to step a unit adds its work to the lanes of the phase in which it does it.

[Note: loads]
Of N units, of which k fit into the window, the last k stay there for backward, and the first k after it:
N - k are sent in backward, and N - k in forward. After a step, what stayed is sent again, as are units that are kept.
In inference the first ones do not stay: all are sent, but for those that share their place with no other.
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
    window_of,
)


def predict(workload: Workload, machine: Machine, choice: Choice) -> Prediction:
    """Predict what a step takes with a choice."""
    workload = workload.with_on_device(choice.on_device)
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
    """What each lane has to do in a phase of a step: seconds, and bytes of copies.

    Its first unit computes before a place is free for a load, and before anything leaves; its last one computes after
    its load.
    """

    def __init__(self, machine: Machine, first: float = 0.0, last: float = 0.0) -> None:
        self.busy = dict.fromkeys(Lane, 0.0)
        self.copied = dict.fromkeys(Lane, 0)
        # seconds that computing waits for copies of activations, of units that are uneven
        self.held_up = 0.0
        self._machine = machine
        self._first = first
        self._last = last

    def send(self, sizes: Iterable[int]) -> None:
        for nbytes in sizes:
            self.busy[Lane.TO_DEVICE] += self._machine.up(nbytes)
            self.copied[Lane.TO_DEVICE] += nbytes

    def bring_back(self, sizes: Iterable[int]) -> None:
        for nbytes in sizes:
            self.busy[Lane.TO_HOST] += self._machine.down(nbytes)
            self.copied[Lane.TO_HOST] += nbytes

    def step_on_host(self, units: Iterable[UnitWork]) -> None:
        self.busy[Lane.HOST] += sum(map(self._machine.step, units))

    def seconds(self, slots: int, sent_before: float = 0.0) -> float:
        """Return how long the busiest lane takes, if something else is sent for so many seconds before its loads."""
        compute = self.busy[Lane.COMPUTE] + self.held_up
        loads = self.busy[Lane.TO_DEVICE]
        leaving = self.busy[Lane.TO_HOST]
        if slots == 1:
            return max(compute + sent_before + loads, self._first + leaving)
        sending = sent_before
        if loads:
            sending = max(self._first, sent_before) + loads
        if sending:
            sending += self._last
        return max(compute, sending, self._first + leaving)


class _Step:
    """A step of the optimizer with all of its micro-steps; see [Note: the time of a step]."""

    def __init__(self, workload: Workload, machine: Machine, choice: Choice, ways: Sequence[Way]) -> None:
        self._workload = workload
        self._machine = machine
        self._slots = choice.slots
        self._window = window = window_of(workload, choice)
        # the units that forward begins with, and that are there at the turn
        self._first = window.in_order[0], workload.resident
        first, last = window.in_order[0], window.in_order[-1]
        self._forward = _Phase(machine, first.forward_seconds, last.forward_seconds)
        self._backward = _Phase(machine, last.backward_seconds, first.backward_seconds)
        self._turn = _Phase(machine)
        # once for all micro-steps; what of it sticks out is part of the turn
        self._optimizer = _Phase(machine)
        self._add_computing(ways)
        self._add_loads()
        if workload.trains:
            self._add_activations(ways)
            self._backward.bring_back(unit.gradient_bytes for unit in workload.units[1:])
            self._turn.bring_back(unit.gradient_bytes for unit in self._first)
        if workload.stepping:
            self._step_on_host()

    def _add_computing(self, ways: Sequence[Way]) -> None:
        units = self._workload.units
        self._forward.busy[Lane.COMPUTE] = sum(unit.forward_seconds for unit in units)
        if self._workload.trains:
            again = sum(way.repeating for way in ways)
            self._backward.busy[Lane.COMPUTE] = sum(unit.backward_seconds for unit in units) + again

    def _add_activations(self, ways: Sequence[Way]) -> None:
        leaving = [way.leaving for way in ways[:-UNITS_THAT_STAY]]
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

    def _step_on_host(self) -> None:
        """Add the host's steps of all units, and the weights that it has changed where they lie on the device."""
        self._optimizer.step_on_host(self._workload.everything)
        stay = (*self._window.streamed[: self._slots], *self._window.kept, self._workload.resident)
        self._optimizer.send(unit.bytes_after_step for unit in stay)

    def lanes(self) -> dict[Lane, float]:
        """Return the seconds of work in each lane."""
        phases = (self._forward, self._backward, self._turn)
        times = self._workload.micro_steps
        lanes = dict(self._optimizer.busy)
        for lane in Lane:
            lanes[lane] += times * sum(phase.busy[lane] for phase in phases)
        lanes[Lane.HOST] += (times - 1) * self._workload.add_seconds
        return lanes

    def copied(self, lane: Lane) -> int:
        """Return the bytes of all copies in a lane."""
        phases = (self._forward, self._backward, self._turn)
        copied = sum(phase.copied[lane] for phase in phases)
        return self._workload.micro_steps * copied + self._optimizer.copied[lane]

    def seconds(self) -> float:
        """Return how long it takes."""
        workload = self._workload
        backward = self._backward.seconds(self._slots)
        micro_step = self._forward.seconds(self._slots) + backward + workload.rest_seconds
        if not workload.stepping:
            return workload.micro_steps * micro_step
        gone = self._turn.busy[Lane.TO_HOST]
        stepped = sum(map(self._machine.step, self._first))
        sent = sum(self._machine.up(unit.bytes_after_step) for unit in self._first)
        others_sent = self._optimizer.busy[Lane.TO_DEVICE] - sent
        if workload.stepping == "after backward":  # the first unit before the others
            turn = gone + stepped + sent
            forward = self._forward.seconds(self._slots, others_sent)
        else:
            if workload.stepping == "in backward":
                since_stepping = backward - self._first_gradients()
                others_sent -= max(0.0, since_stepping - self._backward.busy[Lane.TO_DEVICE])
            turn = max(gone + stepped, others_sent) + sent
            forward = self._forward.seconds(self._slots)
        device = forward + backward + max(turn, workload.rest_seconds)
        begins = self._first_gradients()
        if workload.stepping == "after backward":
            begins = backward + gone
        stepping = workload.add_seconds + self._optimizer.busy[Lane.HOST]
        host = begins + stepping + self._last_forward()
        return max(device, host) + (workload.micro_steps - 1) * max(micro_step, workload.add_seconds)

    def _first_gradients(self) -> float:
        """Return when in backward the host has the first gradients: those of the last unit."""
        last = self._window.in_order[-1]
        return last.backward_seconds + self._machine.down(last.gradient_bytes)

    def _last_forward(self) -> float:
        """Return what the last unit, which is stepped last, has to do then."""
        last = self._window.in_order[-1]
        return self._machine.up(last.weight_bytes) + last.forward_seconds
