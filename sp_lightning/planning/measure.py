"""Watches the first steps, and derives a workload and a machine's speeds from a recording of some of them.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import get_args

from sp_lightning.pipeline import ActivationPolicy, Engine, Kind, Recording, Span, available_host_memory
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.activations.policy import RECOMPUTING, WITHOUT_RECOMPUTING
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes
from sp_lightning.pipeline.window.places import sent_bytes
from sp_lightning.planning.cost import UNITS_THAT_STAY, Machine, Stepping, UnitWork, Way, Workload, peak

_POLICIES: tuple[Policy, ...] = get_args(Policy)
# the part of its time that a copy of activations costs even if computing hides it
_HIDDEN_COST = 0.1
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
        step_bytes=sum(2 * w.master.nbytes + w.master.numel() * w.compute_dtype.itemsize for w in trained),
        bytes_after_step=sent_bytes(trained),
    )


def bytes_on_device(engine: Engine, unit: Unit) -> int:
    """Return what a unit would take if it lived on the device; 0 if it may not, or if nothing of it is trained.

    It may if the user allows it and every optimizer steps weight by weight; others look at weights together.
    """
    optimizers, every = engine.optimizers, unit.every_weight
    trained = [weight.master for weight in every if weight.master.requires_grad]
    if not (engine.options.resident_optimizer and optimizers.step_by_unit and trained):
        return 0
    weights = sum(weight.nbytes for weight in every)
    weights += sum(weight.compute_bytes for weight in every if weight.lowered)
    return weights + sum(parameter.nbytes for parameter in trained) + optimizers.state_bytes(trained)


class FirstSteps:
    """Watches steps until enough of them are recorded; `waits` for a step of the optimizer before that, and in it."""

    def __init__(self, engine: Engine, trains: bool, waits: bool) -> None:
        self.trains = trains  # whether the steps have a backward
        self.recording = Recording()  # of what the lanes did
        self.activation_peak = 0
        # of the device that must stay free beside weights, gradients and activations
        self.reserve_bytes = 0
        self.optimizer_steps = self.steps_in_backward = 0  # since the recording has begun
        self._engine = engine
        self._waits = waits
        self._steps = -1  # the first call comes before the first step
        self._scope: ExitStack | None = None
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        return self._engine.optimizers.steps_taken, self._engine.stats.steps_in_backward

    def go_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        counts = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        self.optimizer_steps, self.steps_in_backward = counts
        is_late = self._steps >= _PATIENCE
        saw_optimizer = self.optimizer_steps > 0 or not self._waits or is_late
        if self._scope is None:
            if saw_optimizer and self._steps >= _WARM_UP:
                self._waits &= not is_late
                self._start()
            return True
        self.activation_peak = max(self.activation_peak, self._engine.meter.step_peak)
        if saw_optimizer and self._steps >= _RECORDED:
            self.stop()
            return False
        return True

    def _start(self) -> None:
        self._steps, self._before = 0, self._counts()
        self._memory = self._engine.backend.count_peak_anew()
        self._scope = ExitStack()
        self.recording = self._scope.enter_context(self._engine.backend.trace.record())

    def stop(self) -> None:
        """End the recording, if it has begun."""
        if self._scope is None:
            return
        with suppress(Exception):  # a failed copy has raised elsewhere
            self._scope.close()
        before, memory = self._memory, self._engine.backend.memory()
        # or what operations take is in units' ways
        if before is not None and memory is not None and self._engine.activations.auto is None:
            self.reserve_bytes = max(0, memory.peak - before.allocated - self.activation_peak)


def workload_of(engine: Engine, measured: FirstSteps, machine: Machine) -> Workload:
    """Return the work of a step, with what copies of activations cost on this machine."""
    arrangement, auto, recording = engine.arrangement, engine.activations.auto, measured.recording
    names = {unit.name for unit in arrangement.units}
    steps = [_Step(recording.spans, begin, end, names) for begin, end in recording.steps]
    # a step that returns no loss has none
    steps = [step for step in steps if step.has_backward] or steps
    added = sum(span.end - span.begin for span in recording.spans if span.kind is Kind.ADD)
    stepping: Stepping = "in backward" if measured.steps_in_backward else "under forward"
    if not measured.steps_in_backward and all(step.waits_for_all_gradients for step in steps):
        stepping = "after backward"
    units = [
        replace(
            bytes_of(unit),
            forward_seconds=min(step.forward[unit.name] for step in steps),
            backward_seconds=min(step.backward[unit.name] - step.again[unit.name] for step in steps),
            ways=(_given_way(engine.options.activations, unit, recording, steps),),
            bytes_on_device=bytes_on_device(engine, unit),
        )
        for unit in arrangement.units
    ]
    if auto is not None:
        calls = auto.footprints()
        of_units = [[calls[each.name] for each in unit.members if each.name in calls] for unit in arrangement.units]
        units = _with_ways(units, of_units, machine)
    return Workload(
        units=tuple(units),
        resident=bytes_of(arrangement.resident),
        trains=measured.trains,
        stepping=stepping if measured.optimizer_steps else None,
        micro_steps=max(1, round(len(steps) / measured.optimizer_steps)) if measured.optimizer_steps else 1,
        add_seconds=added / max(1, len(steps) - measured.optimizer_steps),
        rest_seconds=max(0.0, min(step.rest for step in steps)),
        turn_bytes=0 if auto is None else auto.turn_bytes,
        outside_bytes=measured.activation_peak if auto is None else auto.outside_bytes,
        reserve_bytes=measured.reserve_bytes,
    )


def machine_of(recording: Recording) -> Machine:
    """Return the speed of copies and of the optimizer."""
    up, copy_seconds = _rate(recording, Kind.LOAD, Kind.FETCH)
    down, host = _rate(recording, Kind.GRADIENTS, Kind.OFFLOAD)[0], _rate(recording, Kind.STEP)[0]
    return Machine(up, up if math.isinf(down) else down, host, copy_seconds)


class _Step:
    """One recorded step: each unit's seconds of computing, by its name; of backward, `again` is its second forward."""

    def __init__(self, spans: Sequence[Span], begin: float, end: float, units: Collection[str]) -> None:
        spans = [span for span in spans if begin <= span.begin < end and span.end > begin]
        of = {kind: [span for span in spans if span.kind is kind] for kind in Kind}
        self._stalls, backward = of[Kind.STALL], of[Kind.BACKWARD]
        self.has_backward = bool(backward)
        turned = backward[0].begin if backward else None
        forward = [span for span in of[Kind.FORWARD] if turned is None or span.begin < turned]
        self.again: dict[str, float] = defaultdict(float)
        computing = [span for span in spans if span.kind in (Kind.FORWARD, Kind.BACKWARD)]
        for before, span, after in zip(computing, computing[1:], computing[2:], strict=False):
            if span.kind is Kind.FORWARD and before.kind is after.kind is Kind.BACKWARD:
                self.again[span.name] += self._without_stalls(span.begin, span.end)
        self.forward, self.backward = self._by_unit(forward, turned, units), self._by_unit(backward, None, units)
        known = [*self.forward.values(), *self.backward.values(), *(span.end - span.begin for span in self._stalls)]
        self.rest = end - begin - sum(known)  # the device neither computed nor waited for a copy
        gradients, stepped = of[Kind.GRADIENTS], of[Kind.STEP]
        self.waits_for_all_gradients = bool(gradients and stepped) and all(
            span.begin >= gradients[-1].end for span in stepped if span.begin > gradients[0].begin
        )

    def _by_unit(self, spans: Sequence[Span], until: float | None, units: Collection[str]) -> dict[str, float]:
        """Sum up seconds for each unit: from each of its calls to the next call, but for stalls."""
        seconds: dict[str, float] = defaultdict(float)
        if not spans:
            return seconds
        latest = None
        last = spans[-1].end if until is None else until
        ends = [*(span.begin for span in spans[1:]), last]
        for span, end in zip(spans, ends, strict=True):
            latest = span.name if span.name in units else latest
            if latest is not None:
                seconds[latest] += self._without_stalls(span.begin, end)
        return seconds

    def _without_stalls(self, begin: float, end: float) -> float:
        return end - begin - sum(stall.end - stall.begin for stall in self._stalls if begin <= stall.begin < end)


def _rate(recording: Recording, *kinds: Kind) -> tuple[float, float]:
    """Return the bytes per second of this work and its constant cost in seconds, if sizes differ enough to tell it."""
    pieces = [(each.nbytes, each.end - each.begin) for each in recording.spans if each.kind in kinds and each.nbytes]
    nbytes, seconds = sum(size for size, _ in pieces), sum(time for _, time in pieces)
    if not seconds:
        return math.inf, 0.0
    if max(pieces)[0] >= 2 * min(pieces)[0]:
        mean = nbytes / len(pieces)
        slope = sum((size - mean) * time for size, time in pieces) / sum((size - mean) ** 2 for size, _ in pieces)
        constant = seconds / len(pieces) - slope * mean
        if slope > 0 and constant > 0:
            return 1 / slope, constant
    return nbytes / seconds, 0.0


def _given_way(policy: ActivationPolicy, unit: Unit, recording: Recording, steps: Sequence[_Step]) -> Way:
    """Return the way of a unit's activations where the user chose the policy; what it holds is not known."""
    copies = [span.nbytes for span in recording.spans if span.kind is Kind.OFFLOAD and span.name == unit.name]
    leaving, again = sum(copies) // len(recording.steps), min(step.again[unit.name] for step in steps)
    return Way("keep" if policy == "auto" else policy, 0, 0, seconds=0.0, leaving=leaving, repeating=again)


def _with_ways(units: Sequence[UnitWork], calls: Sequence[Sequence[Footprint]], machine: Machine) -> list[UnitWork]:
    """Return the units with the ways of their activations, where calls of their members were measured."""
    room, large = available_host_memory(), sum(call.large for of_unit in calls for call in of_unit)
    no_copies = math.isinf(machine.to_device) or (room is not None and room < _HOST_ROOM * large)
    result = []
    for number, (unit, of_unit) in enumerate(zip(units, calls, strict=True)):
        if of_unit:
            # as the first one, if no second one was recorded
            again = unit.ways[0].repeating or unit.forward_seconds
            copies = None if no_copies or number >= len(units) - UNITS_THAT_STAY else machine
            unit = replace(unit, ways=ways_of(unit, of_unit, again, copies, inputs_stay=number == 0))
        result.append(unit)
    return result


def ways_of(
    unit: UnitWork, calls: Sequence[Footprint], again: float, machine: Machine | None, inputs_stay: bool = False
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members, as far as they can follow.

    Its second forward takes `again` seconds. Without a machine, whose copies cost something, nothing can be offloaded.
    If `inputs_stay`, those of the first member are the batch, which whoever runs the step holds.
    """
    ways: dict[tuple[int, int], Way] = {}
    for policy in _POLICIES if machine is not None else _POLICIES[:2]:
        members = [_way_of(call, policy, inputs_stay and number == 0) for number, call in enumerate(calls)]
        held, leaving = sum(way.held for way in members), sum(way.leaving for way in members)
        repeating = again if any(way.policy in RECOMPUTING for way in members) else 0.0
        copying = _offload_seconds(machine, unit, leaving, repeating) if machine is not None and leaving else 0.0
        way = Way(policy, held, peak(members), repeating + copying, leaving, members[-1].under_way, repeating)
        ways.setdefault((held, leaving), way)
    return tuple(ways.values())


def _offload_seconds(machine: Machine, unit: UnitWork, nbytes: int, repeating: float) -> float:
    """Return what it costs to have so many bytes of a unit's activations wait on the host.

    Its forward hides their way out. Its backward, in which it computes for so many more seconds if its forward runs
    again, hides the way back of them and of its weights.
    """
    backward = unit.backward_seconds + repeating
    sending = max(0.0, machine.down(nbytes) - unit.forward_seconds)
    waiting_anyway = max(0.0, machine.up(unit.weight_bytes) - backward)
    fetching = max(0.0, machine.up(unit.weight_bytes + nbytes) - backward) - waiting_anyway
    return sending + fetching + _HIDDEN_COST * (machine.up(nbytes) + machine.down(nbytes))


def _way_of(call: Footprint, policy: Policy, inputs_stay: bool) -> Way:
    """Return the way of a member's activations, without what it costs."""
    followed = policy if call.repeatable else WITHOUT_RECOMPUTING.get(policy, policy)
    inputs = 0 if inputs_stay else call.held
    held = call.held + (0 if followed in RECOMPUTING else call.saved)
    leaving = {"offload": min(call.large, inputs + call.saved), "recompute_offload": inputs}.get(followed, 0)
    return Way(followed, held - leaving, call.working, 0.0, leaving, under_way=leaving)
