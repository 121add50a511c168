"""Derives a workload and a machine's speeds from a recording of some steps.

Each number is taken from the fastest of the recorded steps, as disturbances only make them slower. Time that computing
waited for copies (stalls) is subtracted, so the numbers hold for any window. Time between the calls of two units counts
for the earlier one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sp_lightning.pipeline import Kind, Recording, Span, Survey
from sp_lightning.pipeline.activations.ways import RECOMPUTING, Policy, Way, peak
from sp_lightning.pipeline.gradients.buffers import gradient_bytes
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.device_layout import sent_bytes, stepped_bytes
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.weights.sections import count_sections
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.planning.workload import Machine, Stepping, UnitWork, Workload, calls_in_order

_FOLLOWED: dict[Policy, tuple[Policy, ...]] = {
    "keep": ("keep",),
    "recompute": ("recompute", "keep"),
    "offload": ("offload", "keep"),
    "recompute_offload": ("recompute_offload", "recompute", "offload", "keep"),
}
"""For each policy of a unit, what its members do: the first of these that is open to them."""

_MIN_SIZE_RATIO = 2  # largest to smallest copy, for a copy's constant cost to be told from its bandwidth


@dataclass(frozen=True)
class Observed:
    """Observations of the recorded steps that are not in the recording.

    Args:
        trains: Whether the steps had a backward.
        policies: For each step, the policy of each member's activations, if they are chosen per unit.
        activation_peak: Peak bytes of activations.
        turn_bytes: Peak bytes that were taken after the last unit, if policies are chosen per unit.
        outside_bytes: Peak bytes that were otherwise saved outside of units.
        reserve_bytes: Device memory that must stay free beside weights, gradients and activations.
        optimizer_steps: Number of steps of optimizers.
        overlapped: Number of units that were stepped while the device computed.
        in_backward: The part of `overlapped` that happened before backward had ended.
    """

    trains: bool
    policies: Sequence[Mapping[str, Policy]]
    activation_peak: int
    turn_bytes: int
    outside_bytes: int
    reserve_bytes: int
    optimizer_steps: int
    overlapped: int
    in_backward: int


def workload_of(survey: Survey, recording: Recording, observed: Observed) -> Workload:
    """Return the work of a step."""
    arrangement, auto = survey.arrangement, survey.activations
    steps = [_Step(arrangement, recording, begin, end) for begin, end in recording.steps]
    ways = {} if auto is None else auto.ways()
    policies = observed.policies if len(observed.policies) == len(steps) else [{}] * len(steps)
    recorded = [*zip(steps, policies, strict=True)]
    seen = [(step, chosen) for step, chosen in recorded if step.backward] or recorded
    steps = [step for step, _ in seen]
    numbers = {unit.name: number for number, unit in enumerate(arrangement.units)}
    calls = calls_in_order((numbers.get(name) for name in steps[0].called), len(numbers))
    units = tuple(_unit_work(survey, unit, recording, seen, ways) for unit in arrangement.units)
    by_choice = peak([unit.ways[0] for unit in units]) if auto is None else 0
    stepping = _stepping(observed)
    return Workload(
        units=units,
        resident=UnitWork(
            "resident",
            weight_bytes=sent_bytes([arrangement.resident]),
            gradient_bytes=_moved(recording, Kind.GRADIENTS, arrangement.resident) // len(steps),
            parameters=_trainable(arrangement.resident),
            sections=count_sections(weight.layout for weight in arrangement.resident.weights),
            stepped_bytes=stepped_bytes(arrangement.resident),
        ),
        trains=observed.trains,
        stepping=stepping,
        micro_steps=max(1, round(len(steps) / observed.optimizer_steps)) if observed.optimizer_steps else 1,
        clips=stepping == "under forward" and all(step.waits_for_all_gradients for step in steps),
        turn_seconds=min(step.turn for step in steps),
        rest_seconds=max(0.0, min(step.rest(apart=stepping == "apart") for step in steps)),
        turn_bytes=observed.turn_bytes,
        outside_bytes=max(0, observed.activation_peak - by_choice) if auto is None else observed.outside_bytes,
        staging_bytes=max(map(gradient_bytes, arrangement.all_units)),
        staging_buffers=arrangement.staging_buffers,
        reserve_bytes=observed.reserve_bytes,
        calls=calls,
    )


def _unit_work(
    survey: Survey,
    unit: Unit,
    recording: Recording,
    seen: Sequence[tuple[_Step, Mapping[str, Policy]]],
    ways: Mapping[str, Sequence[Way]],
) -> UnitWork:
    """Return the work of a unit, from steps with the policies that were in use."""
    leaving = _moved(recording, Kind.OFFLOAD, unit) // len(seen)
    backward = min(step.backward[unit.name] - _second_forwards(unit, ways, policies) for step, policies in seen)
    return UnitWork(
        name=unit.name,
        weight_bytes=sent_bytes([unit]),
        gradient_bytes=_moved(recording, Kind.GRADIENTS, unit) // len(seen),
        parameters=_trainable(unit),
        forward_seconds=min(step.forward[unit.name] for step, _ in seen),
        backward_seconds=max(0.0, backward),
        host_bytes=sum(weight.nbytes for weight in unit.weights),
        ways=_ways_of(unit, ways) or (_explicit(survey.options.activations, leaving),),
        bytes_on_device=survey.bytes_on_device(unit),
        sections=count_sections(weight.layout for weight in unit.weights),
        stepped_bytes=stepped_bytes(unit),
    )


def machine_of(arrangement: Arrangement, recording: Recording) -> Machine:
    """Return the speed of copies and of the optimizer."""
    to_device, copy_seconds = _rate(recording.spans, (Kind.LOAD, Kind.FETCH))
    to_host, _ = _rate(recording.spans, (Kind.GRADIENTS, Kind.OFFLOAD))
    parameters = {
        group.name: sum(_trainable(unit) for unit in arrangement.all_units if unit.group is group)
        for group in arrangement.groups
    }
    stepped = [span for span in recording.spans if span.kind is Kind.STEP]
    seconds = sum(span.end - span.begin for span in stepped)
    spans_each = {group.name: len(group.host.sections) for group in arrangement.groups}  # one for each section
    count = sum(parameters[span.name] / spans_each[span.name] for span in stepped)
    return Machine(
        to_device=to_device,
        to_host=to_host,
        optimizer=count / seconds if count and seconds else math.inf,
        copy_seconds=copy_seconds,
    )


class _Step:
    """One recorded step.

    Attributes:
        forward: Seconds of computing for each unit in forward, by the unit's name.
        backward: Seconds of computing for each unit in backward, by the unit's name.
        called: Names of the units that forward called, call by call.
        turn: Seconds between forward and backward.
        waits_for_all_gradients: Whether no unit was stepped before the last gradient had landed.
    """

    def __init__(self, arrangement: Arrangement, recording: Recording, begin: float, end: float) -> None:
        units = {unit.name for unit in arrangement.units}
        spans = [span for span in recording.spans if begin <= span.begin < end and span.end > begin]
        self._seconds = end - begin
        self._spans = spans
        self._stalls = [span for span in spans if span.kind is Kind.STALL]
        self._begins = [span.begin for span in self._stalls]
        self._stalled = [0.0, *accumulate(span.end - span.begin for span in self._stalls)]
        backward = self._of(Kind.BACKWARD)
        turned = backward[0].begin if backward else end
        forward = [span for span in self._of(Kind.FORWARD) if span.begin < turned]
        self.called = [span.name for span in forward]
        self.forward = self._sum(forward, units)
        self.backward = self._sum(backward, units)
        self.turn = self._computing(forward[-1].end, turned) if forward and backward else 0.0
        gradients, stepped = self._of(Kind.GRADIENTS), self._of(Kind.STEP)
        self.waits_for_all_gradients = bool(gradients and stepped) and all(
            span.begin >= gradients[-1].end for span in stepped if span.begin > gradients[0].begin
        )

    def rest(self, apart: bool) -> float:
        """Return the seconds of the step in which the device neither computed nor waited for a copy.

        Args:
            apart: Whether the optimizer's work falls into that time, and is to be subtracted.
        """
        known = sum(self.forward.values()) + sum(self.backward.values()) + self.turn + self._stalled[-1]
        stepped = sum(span.end - span.begin for span in self._of(Kind.STEP)) if apart else 0.0
        return self._seconds - known - stepped

    def _of(self, kind: Kind) -> list[Span]:
        return [span for span in self._spans if span.kind is kind]

    def _sum(self, spans: Sequence[Span], units: Iterable[str]) -> dict[str, float]:
        """Sum up seconds for each unit; time between its call and the next unit's counts for it."""
        seconds: dict[str, float] = defaultdict(float)
        latest = None
        ends = [following.begin for _, following in pairwise(spans)] + [span.end for span in spans[-1:]]
        for span, end in zip(spans, ends, strict=True):
            latest = span.name if span.name in units else latest
            if latest is not None:
                seconds[latest] += self._computing(span.begin, end)
        return seconds

    def _computing(self, begin: float, end: float) -> float:
        first, last = bisect_left(self._begins, begin), bisect_left(self._begins, end)
        return end - begin - (self._stalled[last] - self._stalled[first])


def _rate(spans: Iterable[Span], kinds: tuple[Kind, ...]) -> tuple[float, float]:
    """Return the bytes per second of copies and their constant cost in seconds, if sizes differ enough to tell it."""
    copies = [(span.nbytes, span.end - span.begin) for span in spans if span.kind in kinds and span.nbytes]
    nbytes, seconds = sum(size for size, _ in copies), sum(time for _, time in copies)
    if not seconds:
        return math.inf, 0.0
    mean = nbytes / len(copies)
    spread = sum((size - mean) ** 2 for size, _ in copies)
    if max(copies)[0] >= _MIN_SIZE_RATIO * min(copies)[0]:
        slope = sum((size - mean) * time for size, time in copies) / spread
        constant = seconds / len(copies) - slope * mean
        if slope > 0 and constant > 0:
            return 1 / slope, constant
    return nbytes / seconds, 0.0


def _stepping(observed: Observed) -> Stepping | None:
    if observed.in_backward > 0:
        return "in backward"
    if observed.overlapped > 0:
        return "under forward"
    return "apart" if observed.optimizer_steps > 0 else None


def _trainable(unit: Unit) -> int:
    return sum(weight.master.numel() for weight in unit.weights if weight.master.requires_grad)


def _explicit(policy: ActivationPolicy, leaving: int) -> Way:
    """Return the way of a unit's activations where the user chose the policy; only its copies are known."""
    return Way("keep" if policy == "auto" else policy, held=0, working=0, seconds=0.0, leaving=leaving)


def _ways_of(unit: Unit, ways: Mapping[str, Sequence[Way]]) -> tuple[Way, ...]:
    """Return the ways of a unit's activations: one policy for all members, as far as they can follow it."""
    measured = [{way.policy: way for way in ways[member.name]} for member in unit.members if member.name in ways]
    together = []
    for policy in [policy for policy in _FOLLOWED if any(policy in by_policy for by_policy in measured)]:
        chosen = [next(by_policy[p] for p in _FOLLOWED[policy] if p in by_policy) for by_policy in measured]
        together.append(
            Way(
                policy,
                held=sum(way.held for way in chosen),
                working=peak(chosen),
                seconds=sum(way.seconds for way in chosen),
                leaving=sum(way.leaving for way in chosen),
                under_way=chosen[-1].under_way,
                repeating=sum(way.repeating for way in chosen),
            )
        )
    return tuple(together)


def _second_forwards(unit: Unit, ways: Mapping[str, Sequence[Way]], policies: Mapping[str, Policy]) -> float:
    """Return the seconds that recomputing a unit's forward took in a step."""
    return sum(
        way.seconds
        for member in unit.members
        if policies.get(member.name) in RECOMPUTING
        for way in ways.get(member.name, ())
        if way.policy == "recompute"
    )


def _moved(recording: Recording, kind: Kind, unit: Unit) -> int:
    return sum(span.nbytes for span in recording.spans if span.kind is kind and span.name == unit.name)
