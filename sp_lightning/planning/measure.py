"""Watches the first steps, and derives a workload and a machine's speeds from a recording of some of them.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from sp_lightning.optim.layout import BLOCK
from sp_lightning.optim.of_torch import OnePass
from sp_lightning.optim.on_device import PIECE, Effort, bytes_of_step
from sp_lightning.pipeline import Engine, Kind, Lane, Recording, Span
from sp_lightning.pipeline.lanes.backend import DeviceMemory
from sp_lightning.pipeline.optimizer.kinds import parameters_of, settings_of, why_not_by_unit
from sp_lightning.pipeline.optimizer.visit import PIECES_AT_ONCE
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.placing.places import sent_bytes
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.planning.memory import bytes_meanwhile, ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Way, Workload

_WARM_UP = 1  # steps before the recording
_RECORDED = 2
_PATIENCE = 32  # steps to wait for one of the optimizer
_OF_FOREACH = 3  # what torch's operations on many weights read and write, by what one kernel does
_STATE_IN_CODES = 6  # bytes of state for each number: two moments in fp32 have more, in codes less

_Phase: TypeAlias = tuple[Kind, bool, str]
"""The kind of computing, whether the step's backward has begun before it, and its unit."""

_REST: _Phase = (Kind.STALL, False, "")


def work_of(
    unit: Unit,
    state: int = 0,
    meanwhile: int = 0,
    piece: int = 0,
    *,
    trains: bool = True,
    lives: bool = False,
    visits: bool = False,
) -> UnitWork:
    """Return the bytes of a unit, wherever it is now.

    Its weights have `state` bytes of optimizer state, and its step takes `meanwhile` bytes of the device, or those of a
    `piece`.
    """
    weights = unit.every_weight
    trained = [weight for weight in weights if trains and weight.master.requires_grad]
    masters = sum(weight.nbytes for weight in trained)
    gradients = gradient_bytes(trained)
    on_host = state + sum(weight.nbytes + weight.compute_bytes * weight.lowered for weight in weights)
    step_bytes = 2 * (masters + state) + sum(weight.compute_bytes for weight in trained)
    update = step_bytes + gradients
    work = UnitWork(
        name=unit.name,
        weight_bytes=sent_bytes(weights),
        gradient_bytes=gradients,
        step_bytes=step_bytes,
        # with gradients, as many as masters
        bytes_on_device=on_host + masters + meanwhile if lives else 0,
        update_traffic=_OF_FOREACH * update if meanwhile else update,
        piece_bytes=piece,
        host_bytes=on_host,
        state_bytes=state,
        sum_bytes=masters,
        bytes_after_step=sent_bytes(trained),
    )
    if not visits or not trained:
        return work
    up = masters + state
    down = up + sum(weight.compute_bytes for weight in trained if weight.lowered)
    sizes = [weight.master.numel() for weight in trained]
    numbers = sum(sizes)
    has_halves, has_codes = trained[0].dtype == torch.bfloat16, state < _STATE_IN_CODES * numbers
    effort = Effort.of(has_halves, has_codes)
    traffic = effort.nbytes * numbers
    # one for each piece, and one more after a weight that does not end where the next one begins
    passes = math.ceil(numbers / PIECE) + sum(size % BLOCK > 0 for size in sizes)
    pieces = PIECES_AT_ONCE * min(PIECE, numbers) * (down + gradients) // max(1, numbers)
    return replace(
        work,
        update_traffic=traffic if has_halves or has_codes else work.update_traffic,
        visit_up=up,
        visit_down=down,
        visit_bytes=pieces + bytes_of_step(numbers),
        visit_kernels=effort.kernels * passes,
        visit_traffic=traffic,
    )


def may_live_on_device(optimizers: Iterable[Optimizer], parameters: Collection[nn.Parameter]) -> bool:
    """Tell whether parameters may stay on the device: known optimizers step all trained ones, each by itself.

    A parameter that no optimizer has stepped yet may not: its state would be made there, of unknown size. Any other
    optimizer may look at several weights at once, so that all of its weights are on the host.
    """
    identities = set(map(id, parameters))
    never_stepped = {id(parameter) for parameter in parameters if parameter.requires_grad}
    for optimizer in optimizers:
        stepped = identities.intersection(map(id, parameters_of(optimizer)))
        if stepped and why_not_by_unit(optimizer) is not None:
            return False
        never_stepped -= stepped
    return not never_stepped


def measured_work(engine: Engine, unit: Unit, trains: bool = True) -> UnitWork:
    """Return the bytes of a unit with the optimizer state that it has, and the places where it may be stepped."""
    states, processes = engine.optimizers.states, engine.processes
    optimizers = states.optimizers
    masters = [weight.master for weight in unit.every_weight]
    is_free = engine.options.optimizer_on == "auto"
    is_stepped = trains and any(master.requires_grad for master in masters)
    # the first process, which has the optimizers' state, plans for all; in an evaluation, each does so for itself
    plans = processes is None or processes.is_planner
    on_accelerator = is_stepped and engine.backend.device.type != "cpu"
    return work_of(
        unit,
        states.nbytes(masters),
        *bytes_meanwhile(optimizers if on_accelerator else (), masters),
        trains=trains,
        lives=plans and (is_free or not is_stepped) and (not trains or may_live_on_device(optimizers, masters)),
        # units may be updated on the device if all optimizers step weights in one pass
        visits=is_free
        and processes is None
        and bool(optimizers)
        and all(
            why_not_by_unit(optimizer) is None and OnePass(optimizer, settings).is_possible
            for optimizer in optimizers
            for settings in settings_of(optimizer, engine.steps.fused)
        ),
    )


class FirstSteps:
    """Watches steps until enough of them are recorded; `waits` for a step of the optimizer before that, and in it."""

    def __init__(self, engine: Engine, trains: bool, waits: bool) -> None:
        self.trains = trains  # whether the steps have a backward
        self.recording = Recording()  # the recorded work of the lanes
        # the most device memory that the steps took besides weights and gradients
        self.activation_bytes = 0
        self.optimizer_steps = 0  # since this object was made, or since the recording has begun
        self._engine = engine
        self._waits = waits
        self._steps = -1  # the first call comes before the first step
        self._scope: ExitStack | None = None
        self._before = engine.optimizers.steps_taken
        self._memory: DeviceMemory | None = None  # as the recording began

    def go_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        engine = self._engine
        self.optimizer_steps = engine.optimizers.steps_taken - self._before
        saw_optimizer = self.optimizer_steps > 0 or not self._waits or self._steps >= _PATIENCE
        if self._scope is None:
            if saw_optimizer and self._steps >= _WARM_UP:
                self._steps, self._before = 0, engine.optimizers.steps_taken
                self._memory = engine.backend.count_peak_anew()
                self._scope = ExitStack()
                self.recording = self._scope.enter_context(engine.backend.trace.record())
            return True
        self.activation_bytes = max(self.activation_bytes, engine.meter.step_peak)
        if not saw_optimizer or self._steps < _RECORDED:
            return True
        self.stop()
        return not self.recording.steps

    def stop(self) -> None:
        """End the recording, if it has begun; raise the error of a recorded copy or job that has failed."""
        scope, self._scope = self._scope, None
        if scope is None:
            return
        scope.close()
        memory = self._engine.backend.memory()
        # this includes the memory of operations
        if self._memory is not None and memory is not None:
            self.activation_bytes = max(self.activation_bytes, memory.peak - self._memory.allocated)


def workload_of(engine: Engine, measured: FirstSteps, machine: Machine) -> Workload:
    """Return the work of a step, with the ways of activations that are possible on this machine."""
    auto, recording = engine.activations.auto, measured.recording
    in_order = engine.arrangement.units
    steps = [_computing(recording, begin, end, in_order) for begin, end in recording.steps]
    # a step that returns no loss has no backward
    steps = [step for step in steps if any(kind is Kind.BACKWARD for kind, _, _ in step)] or steps
    phases = set().union(*steps)
    fastest = defaultdict(float, {phase: min(step[phase] for step in steps) for phase in phases})
    stepping: Stepping | None = None
    micro_steps = 1
    if measured.optimizer_steps:
        micro_steps = max(1, round(len(steps) / measured.optimizer_steps))
        stepping = "after backward" if _waits_for_all(recording) else "under forward"
        if engine.stats.steps_in_backward:
            stepping = "in backward"
    units = [
        replace(
            measured_work(engine, unit, measured.trains),
            forward_seconds=fastest[Kind.FORWARD, False, unit.name],
            backward_seconds=fastest[Kind.BACKWARD, True, unit.name],
            ways=ways,
        )
        for unit, ways in zip(in_order, _ways_of_units(engine, recording, fastest, machine), strict=True)
    ]
    resident = measured_work(engine, engine.arrangement.resident, measured.trains)
    everything = (*units, resident)
    always_on_device = () if engine.first_plan is None else engine.first_plan.on_device
    staying = (number for number, unit in enumerate(everything) if unit.name in always_on_device)
    adds_up = micro_steps > 1
    add_seconds = _seconds(_of_kind(recording, Kind.ADD)) / max(1, len(steps) - measured.optimizer_steps)
    # the device has added them up; the host would read and write sums, and read gradients
    if engine.waiting.waited and adds_up:
        add_seconds = max(add_seconds, 3 * sum(unit.sum_bytes for unit in everything) / machine.host)
    return Workload(
        units=tuple(units),
        resident=resident,
        trains=measured.trains,
        stepping=stepping,
        micro_steps=micro_steps,
        adds_up=adds_up,
        staging_buffers=engine.memory.staging_buffers,
        may_wait=engine.waiting.is_limited,
        staying=tuple(staying),
        add_seconds=add_seconds,
        rest_seconds=max(0.0, fastest[_REST]),
        turn_bytes=0 if auto is None else auto.turn_bytes,
        outside_bytes=measured.activation_bytes if auto is None else auto.outside_bytes,
    )


def machine_of(engine: Engine, recording: Recording, before: Machine) -> Machine:
    """Return the speed of copies and of the optimizer; rates that were not recorded keep their values from before."""
    to_device = _rate(recording, Kind.LOAD, Kind.FETCH) or before.to_device
    to_host = _rate(recording, Kind.GRADIENTS, Kind.LATE_GRADIENTS, Kind.OFFLOAD) or min(before.to_host, to_device)
    # steps are recorded by the bytes that they read and write besides state
    units = engine.arrangement.all_units
    recorded = sum(work_of(unit).step_bytes for unit in units)
    moved = sum(measured_work(engine, unit).step_bytes for unit in units)
    host = _rate(recording, Kind.STEP) * moved / max(1, recorded) or before.host
    # The rate of updates includes the waits of kernels.
    updates = _rate(recording, Kind.VISIT) or before.updates
    return replace(
        before,
        to_device=to_device,
        to_host=to_host,
        host=host,
        updates=updates,
        device_memory=engine.backend.memory_rate,
        kernel_seconds=engine.backend.kernel_seconds,
    )


def _computing(recording: Recording, begin: float, end: float, units: Sequence[Unit]) -> dict[_Phase, float]:
    """Return the seconds of computing between two moments, without stalls."""
    names = {unit.name for unit in units}
    spans = [span for span in recording.spans if span.lane is Lane.COMPUTE and begin <= span.begin < end]
    done = max((span.end for span in spans if span.kind is not Kind.STALL), default=begin)
    seconds: dict[_Phase, float] = defaultdict(float)
    now, since, has_turned = _REST, begin, False
    for span in spans:
        if span.kind is Kind.STALL:
            seconds[now if span.begin < done else _REST] -= span.end - span.begin
            continue
        seconds[now] += span.begin - since
        since = span.begin
        has_turned |= span.kind is Kind.BACKWARD
        # time between the calls of two units counts for the earlier one
        name = span.name if span.name in names else now[2]
        now = (span.kind, has_turned, name) if name else _REST
    seconds[now] += done - since
    seconds[_REST] += end - done
    return seconds


def _waits_for_all(recording: Recording) -> bool:
    """Tell whether no unit is stepped while gradients come."""
    steps = [span.begin for span in _of_kind(recording, Kind.STEP)]
    for begin, end in recording.steps:
        backward = [span.begin for span in _of_kind(recording, Kind.BACKWARD) if begin <= span.begin < end]
        if backward and any(backward[0] < moment < backward[-1] for moment in steps):
            return False
    return True


def _of_kind(recording: Recording, *kinds: Kind) -> list[Span]:
    return [span for span in recording.spans if span.kind in kinds]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _rate(recording: Recording, *kinds: Kind) -> float:
    """Return the bytes per second of this work; 0 if there was none."""
    spans = [span for span in _of_kind(recording, *kinds) if span.nbytes]
    seconds = _seconds(spans)
    return sum(span.nbytes for span in spans) / seconds if seconds else 0.0


def _ways_of_units(
    engine: Engine, recording: Recording, fastest: Mapping[_Phase, float], machine: Machine
) -> Iterator[tuple[Way, ...]]:
    """Yield the ways of each unit's activations: as recorded, where the user chose or no call was measured."""
    auto, policy = engine.activations.auto, engine.options.activations
    footprints = {} if auto is None else auto.footprints()
    policies: list[Policy] = ["keep", "recompute"]
    if not math.isinf(machine.to_device):
        policies.append("offload")
    units = engine.arrangement.units
    for unit in units:
        again = fastest[Kind.FORWARD, True, unit.name]
        calls = [footprints[member.name] for member in unit.members if member.name in footprints]
        if not calls:
            copies = [span for span in _of_kind(recording, Kind.OFFLOAD) if span.name == unit.name]
            leaving = sum(span.nbytes for span in copies) // len(recording.steps)
            yield (Way("keep" if policy == "auto" else policy, 0, 0, leaving, repeating=again),)
            continue
        again = again or fastest[Kind.FORWARD, False, unit.name]
        is_last = unit is units[-1]  # backward needs it at once
        yield ways_of(calls, again, policies[:1] if is_last else policies, inputs_stay=unit is units[0])
