"""Watches the first steps, and derives a workload and a machine's speeds from a recording of some of them.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from sp_lightning.pipeline import Engine, Kind, Recording, Span
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.pipeline.window.places import sent_bytes
from sp_lightning.planning.memory import bytes_of_pieces, ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Way, Workload

_WARM_UP = 1  # steps before the recording
_RECORDED = 2
_PATIENCE = 32  # steps to wait for one of the optimizer


def work_of(
    unit: Unit, state: int = 0, meanwhile: int = 0, *, trains: bool = True, lives: bool = False, visits: bool = False
) -> UnitWork:
    """Return the bytes of a unit, wherever it lives now.

    Its weights have so many bytes of optimizer state, and its step takes so many of the device `meanwhile`.
    """
    weights = unit.every_weight
    trained = [weight for weight in weights if trains and weight.master.requires_grad]
    masters = sum(weight.nbytes for weight in trained)
    gradients = gradient_bytes(trained) if trained else 0
    on_host = state + sum(weight.nbytes + weight.compute_bytes * weight.lowered for weight in weights)
    work = UnitWork(
        name=unit.name,
        weight_bytes=sent_bytes(weights),
        gradient_bytes=gradients,
        step_bytes=2 * (masters + state) + sum(weight.compute_bytes for weight in trained),
        bytes_on_device=on_host + masters + meanwhile if lives else 0,  # with gradients, as many as masters
        host_bytes=on_host,
        bytes_after_step=sent_bytes(trained),
    )
    if not visits or not trained:
        return work
    up = masters + state
    down = up + sum(weight.compute_bytes for weight in trained if weight.lowered)
    pieces = bytes_of_pieces(down + gradients, sum(weight.master.numel() for weight in trained))
    return replace(work, visit_up=up, visit_down=down, visit_bytes=pieces)


def measured_work(engine: Engine, unit: Unit, trains: bool = True) -> UnitWork:
    """Return the bytes of a unit with the optimizer state that it has, and of where it may be stepped."""
    states, processes = engine.optimizers.states, engine.processes
    masters = [weight.master for weight in unit.every_weight]
    is_free = engine.options.optimizer_on == "auto"
    is_stepped = trains and any(master.requires_grad for master in masters)
    # the first process, which has the optimizers' state, plans for all; in an evaluation, each does so for itself
    plans = processes is None or processes.plans
    return work_of(
        unit,
        states.nbytes(masters),
        states.bytes_of_step(masters) if is_stepped and engine.backend.device.type != "cpu" else 0,
        trains=trains,
        lives=plans and (not is_stepped or is_free and states.may_live_on_device(masters)),
        visits=is_free and processes is None and states.may_visit(unit, engine.steps.fused),
    )


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
        self._before = self._steps_taken()

    def _steps_taken(self) -> tuple[int, int]:
        return self._engine.optimizers.steps_taken, self._engine.stats.steps_in_backward

    def go_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        engine = self._engine
        taken, in_backward = self._steps_taken()
        self.optimizer_steps = taken - self._before[0]
        self.steps_in_backward = in_backward - self._before[1]
        saw_optimizer = self.optimizer_steps > 0 or not self._waits or self._steps >= _PATIENCE
        if self._scope is None:
            if saw_optimizer and self._steps >= _WARM_UP:
                self._start()
            return True
        self.activation_peak = max(self.activation_peak, engine.meter.step_peak)
        if saw_optimizer and self._steps >= _RECORDED:
            self.stop()
            return not self.recording.steps
        return True

    def _start(self) -> None:
        self._steps = 0
        self._before = self._steps_taken()
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
    auto, spans = engine.activations.auto, measured.recording.spans
    in_order = engine.arrangement.units
    steps = _recorded_steps(measured.recording, {unit.name for unit in in_order})
    offers = _ways_of_units(engine, measured.recording, steps, machine)
    units = [
        replace(
            measured_work(engine, unit, measured.trains),
            forward_seconds=min(step.forward[unit.name] for step in steps),
            backward_seconds=min(step.backward[unit.name] for step in steps),
            ways=ways,
        )
        for unit, ways in zip(in_order, offers, strict=True)
    ]
    stepping: Stepping | None = None
    micro_steps = 1
    if measured.optimizer_steps:
        stepping = "under forward"
        if measured.steps_in_backward:
            stepping = "in backward"
        elif not any(step.steps_meanwhile for step in steps):
            stepping = "after backward"
        micro_steps = max(1, round(len(steps) / measured.optimizer_steps))
    return Workload(
        units=tuple(units),
        resident=measured_work(engine, engine.arrangement.resident, measured.trains),
        trains=measured.trains,
        stepping=stepping,
        micro_steps=micro_steps,
        add_seconds=_seconds(_of_kind(spans, Kind.ADD)) / max(1, len(steps) - measured.optimizer_steps),
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
    recorded = sum(work_of(unit).step_bytes for unit in units)
    moved = sum(measured_work(engine, unit).step_bytes for unit in units)
    host = _rate(recording, Kind.STEP) * moved / max(1, recorded)
    return Machine(to_device, to_device if math.isinf(to_host) else to_host, host)


class _Step:
    """One recorded step: each unit's seconds of computing, without stalls, by its name and what it computed."""

    def __init__(self, spans: Sequence[Span], begin: float, end: float, units: Collection[str]) -> None:
        spans = [span for span in spans if begin <= span.begin < end and span.end > begin]
        computing = _of_kind(spans, Kind.FORWARD, Kind.BACKWARD)
        backward = _of_kind(computing, Kind.BACKWARD)
        turn = backward[0].begin if backward else end
        stalls = _of_kind(spans, Kind.STALL)
        self.forward, self.backward, self.again = (defaultdict[str, float](float) for _ in range(3))
        # the device neither computed nor waited for a copy
        self.rest = end - begin - _seconds(stalls)
        unit = None
        ends = [*(span.begin for span in computing[1:]), *(span.end for span in computing[-1:])]
        for span, until in zip(computing, ends, strict=True):
            of_kind = self.again if span.begin > turn else self.forward
            if span.kind is Kind.BACKWARD:
                of_kind = self.backward
            # time between the calls of two units counts for the earlier one
            unit = span.name if span.name in units else unit
            if unit is not None:
                seconds = until - span.begin - _seconds([each for each in stalls if span.begin <= each.begin < until])
                of_kind[unit] += seconds
                self.rest -= seconds
        # whether something is stepped while gradients come
        last = backward[-1].begin if backward else begin
        self.steps_meanwhile = any(turn < span.begin < last for span in _of_kind(spans, Kind.STEP))


def _recorded_steps(recording: Recording, units: Collection[str]) -> list[_Step]:
    steps = [_Step(recording.spans, begin, end, units) for begin, end in recording.steps]
    # a step that returns no loss has none
    return [step for step in steps if step.backward] or steps


def _of_kind(spans: Sequence[Span], *kinds: Kind) -> list[Span]:
    return [span for span in spans if span.kind in kinds]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _rate(recording: Recording, *kinds: Kind) -> float:
    """Return the bytes per second of this work."""
    spans = [span for span in _of_kind(recording.spans, *kinds) if span.nbytes]
    seconds = _seconds(spans)
    return sum(span.nbytes for span in spans) / seconds if seconds else math.inf


def _ways_of_units(
    engine: Engine, recording: Recording, steps: Sequence[_Step], machine: Machine
) -> Iterator[tuple[Way, ...]]:
    """Yield the ways of each unit's activations: as recorded, where the user chose or no call was measured."""
    auto, policy = engine.activations.auto, engine.options.activations
    footprints = {} if auto is None else auto.footprints()
    policies: list[Policy] = ["keep", "recompute"]
    if not math.isinf(machine.to_device):
        policies.append("offload")
    units = engine.arrangement.units
    for unit in units:
        again = min(step.again[unit.name] for step in steps)
        calls = [footprints[member.name] for member in unit.members if member.name in footprints]
        if not calls:
            copies = [span for span in _of_kind(recording.spans, Kind.OFFLOAD) if span.name == unit.name]
            leaving = sum(span.nbytes for span in copies) // len(recording.steps)
            yield (Way("keep" if policy == "auto" else policy, 0, 0, leaving, repeating=again),)
            continue
        again = again or min(step.forward[unit.name] for step in steps)
        is_last = unit is units[-1]  # backward needs it at once
        yield ways_of(calls, again, policies[:1] if is_last else policies, inputs_stay=unit is units[0])
