"""Watches the first steps, and derives a workload and a machine's speeds from a recording of some of them.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from sp_lightning.pipeline import ActivationPolicy, Engine, Kind, Recording, Span, available_host_memory
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.pipeline.window.places import sent_bytes
from sp_lightning.planning.cost import UNITS_THAT_STAY, Machine, Stepping, UnitWork, Way, Workload
from sp_lightning.planning.memory import bytes_of_pieces
from sp_lightning.planning.ways import ways_of

# offload only if the host has this many times as much memory free as would be offloaded
_HOST_ROOM = 2
_WARM_UP = 1  # steps before the recording
_RECORDED = 2
_PATIENCE = 32  # steps to wait for one of the optimizer


def bytes_of(unit: Unit) -> UnitWork:
    """Return the bytes of a unit, wherever it lives now."""
    weights = unit.every_weight
    trained = [weight for weight in weights if weight.master.requires_grad]
    return UnitWork(
        name=unit.name,
        weight_bytes=sent_bytes(weights),
        gradient_bytes=gradient_bytes(trained) if trained else 0,
        step_bytes=sum(2 * weight.master.nbytes + weight.compute_bytes for weight in trained),
        bytes_after_step=sent_bytes(trained),
    )


def bytes_on_device(engine: Engine, unit: Unit) -> int:
    """Return what a unit would take if it lived on the device; 0 if it may not, or if nothing of it is stepped."""
    states = engine.optimizers.states
    weights = unit.every_weight
    masters = [weight.master for weight in weights]
    # the first process, which has the optimizers' state, chooses for all
    chooses = engine.processes is None or engine.processes.is_first
    is_allowed = engine.options.optimizer_on == "auto" and chooses
    if not (is_allowed and states.may_live_on_device(masters)):
        return 0
    values = sum(weight.nbytes for weight in weights)
    copies = sum(weight.compute_bytes for weight in weights if weight.lowered)
    gradients = sum(master.nbytes for master in masters if master.requires_grad)
    temporary = states.bytes_of_step(masters) if engine.backend.device.type != "cpu" else 0
    return values + copies + gradients + states.most_nbytes(masters) + temporary


def _step_bytes(engine: Engine, unit: Unit) -> int:
    """Return what a step of a unit reads and writes, its state included."""
    masters = [weight.master for weight in unit.every_weight if weight.master.requires_grad]
    return bytes_of(unit).step_bytes + 2 * engine.optimizers.states.nbytes(masters)


class FirstSteps:
    """Watches steps until enough of them are recorded; `waits` for a step of the optimizer before that, and in it."""

    def __init__(self, engine: Engine, trains: bool, waits: bool) -> None:
        self.trains = trains  # whether the steps have a backward
        self.recording = Recording()  # of what the lanes did
        self.activation_peak = 0
        # of the device that must stay free beside weights, gradients and activations
        self.reserve_bytes = 0
        # since this object was made, or since the recording has begun
        self.optimizer_steps = 0
        self.steps_in_backward = 0
        self._engine = engine
        self._waits = waits
        self._steps = -1  # the first call comes before the first step
        self._scope: ExitStack | None = None
        self._count_anew()

    def _count_anew(self) -> None:
        self._optimizer_steps_before = self._engine.optimizers.steps_taken
        self._steps_in_backward_before = self._engine.stats.steps_in_backward

    def go_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        engine = self._engine
        self.optimizer_steps = engine.optimizers.steps_taken - self._optimizer_steps_before
        self.steps_in_backward = engine.stats.steps_in_backward - self._steps_in_backward_before
        is_late = self._steps >= _PATIENCE
        saw_optimizer = self.optimizer_steps > 0 or not self._waits or is_late
        if self._scope is None:
            if saw_optimizer and self._steps >= _WARM_UP:
                if is_late:
                    self._waits = False
                self._start()
            return True
        self.activation_peak = max(self.activation_peak, engine.meter.step_peak)
        if saw_optimizer and self._steps >= _RECORDED:
            self.stop()
            return not self.recording.steps
        return True

    def _start(self) -> None:
        self._steps = 0
        self._count_anew()
        self._memory = self._engine.backend.count_peak_anew()
        self._scope = ExitStack()
        self.recording = self._scope.enter_context(self._engine.backend.trace.record())

    def stop(self) -> None:
        """End the recording, if it has begun; raise what a recorded copy or job has failed with."""
        scope, self._scope = self._scope, None
        if scope is None:
            return
        scope.close()
        before = self._memory
        memory = self._engine.backend.memory()
        # or what operations take is in units' ways
        if before is not None and memory is not None and self._engine.activations.auto is None:
            self.reserve_bytes = max(0, memory.peak - before.allocated - self.activation_peak)


def workload_of(engine: Engine, measured: FirstSteps, machine: Machine) -> Workload:
    """Return the work of a step, with what copies of activations cost on this machine."""
    auto = engine.activations.auto
    recording = measured.recording
    in_order = engine.arrangement.units
    steps = _recorded_steps(recording, {unit.name for unit in in_order})
    units = [_unit_work(engine, unit, recording, steps) for unit in in_order]
    turn_bytes = 0
    outside_bytes = measured.activation_peak
    if auto is not None:
        footprints = auto.footprints()
        units = _with_ways(units, [_calls(unit, footprints) for unit in in_order], steps, machine)
        turn_bytes = auto.turn_bytes
        outside_bytes = auto.outside_bytes
    stepping: Stepping | None = None
    micro_steps = 1
    if measured.optimizer_steps:
        stepping = _stepping(measured, steps)
        micro_steps = max(1, round(len(steps) / measured.optimizer_steps))
    adding = _seconds(_of_kind(recording.spans, Kind.ADD))
    return Workload(
        units=tuple(units),
        resident=replace(
            bytes_of(engine.arrangement.resident),
            step_bytes=_step_bytes(engine, engine.arrangement.resident),
            bytes_on_device=bytes_on_device(engine, engine.arrangement.resident),
        ),
        trains=measured.trains,
        stepping=stepping,
        micro_steps=micro_steps,
        add_seconds=adding / max(1, len(steps) - measured.optimizer_steps),
        rest_seconds=max(0.0, min(step.rest for step in steps)),
        turn_bytes=turn_bytes,
        outside_bytes=outside_bytes,
        reserve_bytes=measured.reserve_bytes,
        lives_whole=engine.optimizers.states.look_at_weights_together,
    )


def machine_of(engine: Engine, recording: Recording) -> Machine:
    """Return the speed of copies and of the optimizer."""
    to_device, copy_seconds = _rate(recording, Kind.LOAD, Kind.FETCH)
    to_host, _ = _rate(recording, Kind.GRADIENTS, Kind.OFFLOAD)
    host, _ = _rate(recording, Kind.STEP)
    # steps are recorded by what they read and write beside state
    units = engine.arrangement.all_units
    recorded = sum(bytes_of(unit).step_bytes for unit in units)
    host *= sum(_step_bytes(engine, unit) for unit in units) / max(1, recorded)
    if math.isinf(to_host):
        to_host = to_device
    return Machine(to_device, to_host, host, copy_seconds)


class _Step:
    """One recorded step: each unit's seconds of computing, by its name.

    `repeated` are the seconds of second forwards, which are among those of backward; a unit without one is not in it.
    """

    def __init__(self, spans: Sequence[Span], begin: float, end: float, units: Collection[str]) -> None:
        spans = [span for span in spans if begin <= span.begin < end and span.end > begin]
        forward = _of_kind(spans, Kind.FORWARD)
        backward = _of_kind(spans, Kind.BACKWARD)
        self._stalls = _of_kind(spans, Kind.STALL)
        self.has_backward = bool(backward)
        turn = None
        if backward:
            turn = backward[0].begin
            forward = [span for span in forward if span.begin < turn]
        self.forward = self._by_unit(forward, turn, units)
        self.backward = self._by_unit(backward, None, units)
        self.repeated = self._second_forwards(spans)
        computing = sum(self.forward.values()) + sum(self.backward.values())
        # the device neither computed nor waited for a copy
        self.rest = end - begin - computing - _seconds(self._stalls)
        # whether nothing is stepped while gradients come
        self.waits_for_all_gradients = self.has_backward and not any(
            backward[0].begin < span.begin < backward[-1].end for span in _of_kind(spans, Kind.STEP)
        )

    def _second_forwards(self, spans: Sequence[Span]) -> dict[str, float]:
        """Sum up the seconds of forwards between two pieces of backward, for each unit that has any."""
        seconds: dict[str, float] = {}
        computing = _of_kind(spans, Kind.FORWARD, Kind.BACKWARD)
        for before, span, after in zip(computing, computing[1:], computing[2:], strict=False):
            if span.kind is Kind.FORWARD and before.kind is after.kind is Kind.BACKWARD:
                former = seconds.get(span.name, 0.0)
                seconds[span.name] = former + self._without_stalls(span.begin, span.end)
        return seconds

    def _by_unit(self, spans: Sequence[Span], until: float | None, units: Collection[str]) -> dict[str, float]:
        """Sum up seconds for each unit: from each of its calls to the next call, but for stalls."""
        seconds = dict.fromkeys(units, 0.0)
        if not spans:
            return seconds
        ends = [span.begin for span in spans[1:]]
        ends.append(spans[-1].end if until is None else until)
        unit = None
        for span, end in zip(spans, ends, strict=True):
            if span.name in seconds:
                unit = span.name
            if unit is not None:
                seconds[unit] += self._without_stalls(span.begin, end)
        return seconds

    def _without_stalls(self, begin: float, end: float) -> float:
        stalls = [stall for stall in self._stalls if begin <= stall.begin < end]
        return end - begin - _seconds(stalls)


def _recorded_steps(recording: Recording, units: Collection[str]) -> list[_Step]:
    steps = [_Step(recording.spans, begin, end, units) for begin, end in recording.steps]
    # a step that returns no loss has none
    with_backward = [step for step in steps if step.has_backward]
    return with_backward or steps


def _stepping(measured: FirstSteps, steps: Sequence[_Step]) -> Stepping:
    if measured.steps_in_backward:
        return "in backward"
    if all(step.waits_for_all_gradients for step in steps):
        return "after backward"
    return "under forward"


def _of_kind(spans: Sequence[Span], *kinds: Kind) -> list[Span]:
    return [span for span in spans if span.kind in kinds]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _rate(recording: Recording, *kinds: Kind) -> tuple[float, float]:
    """Return the bytes per second of this work and its constant cost in seconds, if sizes differ enough to tell it."""
    spans = [span for span in _of_kind(recording.spans, *kinds) if span.nbytes]
    seconds = _seconds(spans)
    if not seconds:
        return math.inf, 0.0
    sizes = [span.nbytes for span in spans]
    if max(sizes) >= 2 * min(sizes):
        times = [span.end - span.begin for span in spans]
        per_byte, constant = statistics.linear_regression(sizes, times)
        if per_byte > 0 and constant > 0:
            return 1 / per_byte, constant
    return sum(sizes) / seconds, 0.0


def _unit_work(engine: Engine, unit: Unit, recording: Recording, steps: Sequence[_Step]) -> UnitWork:
    """Return what was recorded of a unit, with the way of its activations that the user chose."""
    name = unit.name
    work = bytes_of(unit)
    up = down = 0
    if engine.processes is None and engine.options.optimizer_on == "auto":
        up, down = engine.optimizers.states.bytes_of_visit(unit, engine.steps.fused)
    numbers = sum(weight.master.numel() for weight in unit.every_weight if weight.master.requires_grad)
    return replace(
        work,
        step_bytes=_step_bytes(engine, unit),
        forward_seconds=min(step.forward[name] for step in steps),
        backward_seconds=min(step.backward[name] - step.repeated.get(name, 0.0) for step in steps),
        ways=(_given_way(engine.options.activations, name, recording, steps),),
        bytes_on_device=bytes_on_device(engine, unit),
        visit_up=up,
        visit_down=down,
        visit_bytes=bytes_of_pieces(down + work.gradient_bytes, numbers) if up else 0,
    )


def _given_way(policy: ActivationPolicy, unit: str, recording: Recording, steps: Sequence[_Step]) -> Way:
    """Return the way of a unit's activations where the user chose the policy; what it holds is not known."""
    copies = _of_kind(recording.spans, Kind.OFFLOAD)
    leaving = sum(span.nbytes for span in copies if span.name == unit) // len(recording.steps)
    return Way(
        policy="keep" if policy == "auto" else policy,
        held=0,
        working=0,
        seconds=0.0,
        leaving=leaving,
        repeating=min(step.repeated.get(unit, 0.0) for step in steps),
    )


def _calls(unit: Unit, footprints: Mapping[str, Footprint]) -> list[Footprint]:
    """Return what calls of a unit's members took, as far as they were measured."""
    names = [member.name for member in unit.members]
    return [footprints[name] for name in names if name in footprints]


def _with_ways(
    units: Sequence[UnitWork],
    calls: Sequence[Sequence[Footprint]],
    steps: Sequence[_Step],
    machine: Machine,
) -> list[UnitWork]:
    """Return the units with the ways of their activations, where calls of their members were measured."""
    room = available_host_memory()
    large = sum(sum(call.large for call in of_members) for of_members in calls)
    has_room = room is None or room >= _HOST_ROOM * large
    can_offload = has_room and not math.isinf(machine.to_device)
    result = []
    for number, (unit, of_members) in enumerate(zip(units, calls, strict=True)):
        if not of_members:
            result.append(unit)
            continue
        second_forward = unit.forward_seconds
        if all(unit.name in step.repeated for step in steps):
            second_forward = min(step.repeated[unit.name] for step in steps)
        leaves = can_offload and number < len(units) - UNITS_THAT_STAY
        copies = machine if leaves else None
        ways = ways_of(unit, of_members, second_forward, copies, inputs_stay=number == 0)
        result.append(replace(unit, ways=ways))
    return result
