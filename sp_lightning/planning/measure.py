"""Watches the first steps, and derives a workload and a machine's speeds from a recording of some of them.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

from sp_lightning.pipeline import Engine, Kind, Recording, Span, available_host_memory
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.pipeline.window.places import sent_bytes
from sp_lightning.planning.memory import bytes_of_pieces
from sp_lightning.planning.ways import ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Way, Workload

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


def bytes_on_device(engine: Engine, unit: Unit, trains: bool = True) -> int:
    """Return what a unit would take if it lived on the device; 0 if it may not."""
    states = engine.optimizers.states
    weights = unit.every_weight
    masters = [weight.master for weight in weights]
    # the first process, which has the optimizers' state, plans for all; in an evaluation, each does so for itself
    if engine.processes is not None and not engine.processes.plans:
        return 0
    is_stepped = trains and any(master.requires_grad for master in masters)
    if is_stepped and not (engine.options.optimizer_on == "auto" and states.may_live_on_device(masters)):
        return 0
    values = sum(weight.nbytes for weight in weights)
    copies = sum(weight.compute_bytes for weight in weights if weight.lowered)
    nbytes = values + copies + states.nbytes(masters)
    if is_stepped:
        nbytes += sum(master.nbytes for master in masters if master.requires_grad)
        nbytes += states.bytes_of_step(masters) if engine.backend.device.type != "cpu" else 0
    return nbytes


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
    """Return the work of a step, with ways of activations that can be gone on this machine."""
    auto = engine.activations.auto
    in_order = engine.arrangement.units
    steps = _recorded_steps(measured.recording, {unit.name for unit in in_order})
    units = [_unit_work(engine, unit, measured, steps) for unit in in_order]
    stepping: Stepping | None = None
    micro_steps = 1
    if measured.optimizer_steps:
        stepping = "under forward"
        if measured.steps_in_backward:
            stepping = "in backward"
        elif not any(step.steps_meanwhile for step in steps):
            stepping = "after backward"
        micro_steps = max(1, round(len(steps) / measured.optimizer_steps))
    adding = _seconds(_of_kind(measured.recording.spans, Kind.ADD))
    resident = engine.arrangement.resident
    return Workload(
        units=tuple(units if auto is None else _with_ways(engine, units, steps, machine)),
        resident=replace(
            bytes_of(resident),
            step_bytes=_step_bytes(engine, resident),
            bytes_on_device=bytes_on_device(engine, resident, measured.trains),
        ),
        trains=measured.trains,
        stepping=stepping,
        micro_steps=micro_steps,
        add_seconds=adding / max(1, len(steps) - measured.optimizer_steps),
        rest_seconds=max(0.0, min(step.rest for step in steps)),
        turn_bytes=0 if auto is None else auto.turn_bytes,
        outside_bytes=measured.activation_peak if auto is None else auto.outside_bytes,
        reserve_bytes=measured.reserve_bytes,
        lives_whole=engine.optimizers.states.look_at_weights_together,
    )


def machine_of(engine: Engine, recording: Recording) -> Machine:
    """Return the speed of copies and of the optimizer."""
    to_device = _rate(recording, Kind.LOAD, Kind.FETCH)
    to_host = _rate(recording, Kind.GRADIENTS, Kind.OFFLOAD)
    # steps are recorded by what they read and write beside state
    units = engine.arrangement.all_units
    recorded = sum(bytes_of(unit).step_bytes for unit in units)
    moved = sum(_step_bytes(engine, unit) for unit in units)
    host = _rate(recording, Kind.STEP) * moved / max(1, recorded)
    return Machine(to_device, to_device if math.isinf(to_host) else to_host, host)


class _Step:
    """One recorded step: each unit's seconds of computing, without stalls, by its name and what it computed."""

    def __init__(self, spans: Sequence[Span], begin: float, end: float, units: Collection[str]) -> None:
        spans = [span for span in spans if begin <= span.begin < end and span.end > begin]
        computing = _of_kind(spans, Kind.FORWARD, Kind.BACKWARD)
        backward = _of_kind(computing, Kind.BACKWARD)
        self.has_backward = bool(backward)
        if backward:
            computing = computing[: computing.index(backward[-1]) + 1]
        stalls = _of_kind(spans, Kind.STALL)
        self.forward, self.backward, self.again = (defaultdict[str, float](float) for _ in range(3))
        unit = None
        ends = [*(span.begin for span in computing[1:]), *(span.end for span in computing[-1:])]
        for span, until in zip(computing, ends, strict=True):
            of_kind = self.backward
            if span.kind is Kind.FORWARD:
                of_kind = self.again if backward and span.begin > backward[0].begin else self.forward
            # time between the calls of two units counts for the earlier one
            unit = span.name if span.name in units else unit
            if unit is not None:
                waited = [stall for stall in stalls if span.begin <= stall.begin < until]
                of_kind[unit] += until - span.begin - _seconds(waited)
        busy = sum(sum(seconds.values()) for seconds in (self.forward, self.backward, self.again))
        # the device neither computed nor waited for a copy
        self.rest = end - begin - busy - _seconds(stalls)
        # whether something is stepped while gradients come
        self.steps_meanwhile = any(
            backward and backward[0].begin < span.begin < backward[-1].end for span in _of_kind(spans, Kind.STEP)
        )


def _recorded_steps(recording: Recording, units: Collection[str]) -> list[_Step]:
    steps = [_Step(recording.spans, begin, end, units) for begin, end in recording.steps]
    # a step that returns no loss has none
    with_backward = [step for step in steps if step.has_backward]
    return with_backward or steps


def _of_kind(spans: Sequence[Span], *kinds: Kind) -> list[Span]:
    return [span for span in spans if span.kind in kinds]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _rate(recording: Recording, *kinds: Kind) -> float:
    """Return the bytes per second of this work."""
    spans = [span for span in _of_kind(recording.spans, *kinds) if span.nbytes]
    seconds = _seconds(spans)
    return sum(span.nbytes for span in spans) / seconds if seconds else math.inf


def _unit_work(engine: Engine, unit: Unit, measured: FirstSteps, steps: Sequence[_Step]) -> UnitWork:
    """Return what was recorded of a unit; where the user chose what its activations do, what they hold is not known."""
    name, work = unit.name, bytes_of(unit)
    states = engine.optimizers.states
    up = down = 0
    if engine.processes is None and engine.options.optimizer_on == "auto":
        up, down = states.bytes_of_visit(unit, engine.steps.fused)
    numbers = sum(weight.master.numel() for weight in unit.every_weight if weight.master.requires_grad)
    recording, policy = measured.recording, engine.options.activations
    copies = [span for span in _of_kind(recording.spans, Kind.OFFLOAD) if span.name == name]
    way = Way(
        policy="keep" if policy == "auto" else policy,
        held=0,
        working=0,
        leaving=sum(span.nbytes for span in copies) // len(recording.steps),
        repeating=min(step.again[name] for step in steps),
    )
    return replace(
        work,
        step_bytes=_step_bytes(engine, unit),
        forward_seconds=min(step.forward[name] for step in steps),
        backward_seconds=min(step.backward[name] for step in steps),
        ways=(way,),
        bytes_on_device=bytes_on_device(engine, unit, measured.trains),
        visit_up=up,
        visit_down=down,
        visit_bytes=bytes_of_pieces(down + work.gradient_bytes, numbers) if up else 0,
    )


def _with_ways(engine: Engine, units: Sequence[UnitWork], steps: Sequence[_Step], machine: Machine) -> list[UnitWork]:
    """Return the units with the ways of their activations, where calls of their members were measured."""
    auto = engine.activations.auto
    assert auto is not None
    footprints = auto.footprints()
    calls = [
        [footprints[member.name] for member in unit.members if member.name in footprints]
        for unit in engine.arrangement.units
    ]
    room = available_host_memory()
    large = sum(call.large for of_members in calls for call in of_members)
    has_room = room is None or room >= _HOST_ROOM * large
    can_offload = has_room and not math.isinf(machine.to_device)
    result = []
    for number, (unit, of_members) in enumerate(zip(units, calls, strict=True)):
        again = min(step.again[unit.name] for step in steps) or unit.forward_seconds
        policies: list[Policy] = ["keep"]
        if number < len(units) - 1:  # backward needs the last one's at once
            policies += ["recompute", "offload"] if can_offload else ["recompute"]
        ways = ways_of(of_members, again, policies, inputs_stay=number == 0) if of_members else unit.ways
        result.append(replace(unit, ways=ways))
    return result
