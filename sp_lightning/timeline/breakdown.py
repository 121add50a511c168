"""A recording in numbers: how busy each lane was, what computing waited for, and which lane is the bottleneck."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sp_lightning.pipeline import Kind, Lane, Recording

Interval = tuple[float, float]

_COMPUTES_ALL_THE_TIME = 0.9  # the share of the time from which on computing itself is the bottleneck
_SUPPLIERS = {"gradients": (Lane.TO_HOST, Lane.HOST, Lane.TO_DEVICE)}
_USUAL_SUPPLIERS = (Lane.TO_DEVICE, Lane.HOST, Lane.TO_HOST)
"""Lanes to blame for a wait, in this order: the first one that is busy at that moment."""


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the recorded steps went. Times are in seconds, for all steps together.

    Attributes:
        begin: When the first step began.
        end: When the last step ended.
        steps: Number of steps.
        busy: How long each lane worked; stalls are not work.
        nbytes: How many bytes each lane moved.
        kinds: How long each kind of work took; computing does not include the stalls in it.
        stalls: How long computing waited for "weights", "gradients" or "activations".
        blamed: How long computing waited for each lane's work.
        hidden: How long copies and work on the host ran while the device computed.
        beside: How long copies and work on the host ran in total.
    """

    begin: float
    end: float
    steps: int
    busy: dict[Lane, float]
    nbytes: dict[Lane, int]
    kinds: dict[Kind, float]
    stalls: dict[str, float]
    blamed: dict[Lane, float]
    hidden: float
    beside: float

    @property
    def seconds(self) -> float:
        """The time of all steps together."""
        return self.end - self.begin

    @property
    def stalled(self) -> float:
        """How long computing waited for copies."""
        return self.kinds[Kind.STALL]

    @property
    def elsewhere(self) -> float:
        """How long no unit computed or waited for a copy: the loss, the loop, data."""
        return max(0.0, self.seconds - self.busy[Lane.COMPUTE] - self.stalled)

    @property
    def overlap(self) -> float:
        """The share of copies and work on the host that ran while the device computed; 1 if there was none."""
        return self.hidden / self.beside if self.beside else 1.0

    def share(self, seconds: float) -> float:
        """Return the share of the total time that some seconds are."""
        return seconds / self.seconds if self.seconds else 0.0

    def rate(self, lane: Lane) -> float:
        """Return the bytes per second that a lane moved while it worked."""
        return self.nbytes[lane] / self.busy[lane] if self.busy[lane] else 0.0

    @property
    def bottleneck(self) -> Lane | None:
        """The lane that limits a step: computing, or the one that it waits for most; None if the limit is elsewhere."""
        if self.share(self.busy[Lane.COMPUTE]) >= _COMPUTES_ALL_THE_TIME:
            return Lane.COMPUTE
        lane = max(self.blamed, key=lambda lane: self.blamed[lane])
        return lane if self.blamed[lane] > self.elsewhere else None


def break_down(recording: Recording) -> Breakdown:
    """Add up the times of a recording's steps. Work outside of them does not count.

    Args:
        recording: A finished recording.

    Raises:
        ValueError: If it has no step.
    """
    if not recording.steps:
        raise ValueError("The recording has no step: surround at least one forward with `with pipeline.record()`.")
    begin, end = recording.steps[0][0], recording.steps[-1][1]
    inside: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    causes: dict[str, list[Interval]] = {}
    nbytes = dict.fromkeys(Lane, 0)
    for span in recording.spans:
        clipped = max(begin, span.begin), min(end, span.end)
        if clipped[0] >= clipped[1]:
            continue
        inside[span.kind].append(clipped)
        nbytes[span.lane] += round(span.nbytes * (clipped[1] - clipped[0]) / (span.end - span.begin))
        if span.kind is Kind.STALL:
            causes.setdefault(span.name, []).append(clipped)
    stalls = union(inside[Kind.STALL])
    kinds = {kind: union(intervals) for kind, intervals in inside.items()}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        kinds[kind] = without(kinds[kind], stalls)
    busy = {lane: union(i for kind in Kind if kind.lane is lane for i in kinds[kind]) for lane in Lane}
    computing = busy[Lane.COMPUTE] = without(busy[Lane.COMPUTE], stalls)
    causes = {cause: union(intervals) for cause, intervals in causes.items()}
    beside = union(interval for lane in Lane if lane is not Lane.COMPUTE for interval in busy[lane])
    return Breakdown(
        begin=begin,
        end=end,
        steps=len(recording.steps),
        busy={lane: length(intervals) for lane, intervals in busy.items()},
        nbytes=nbytes,
        kinds={kind: length(intervals) for kind, intervals in kinds.items()},
        stalls={cause: length(intervals) for cause, intervals in causes.items()},
        blamed=_blame(causes, busy),
        hidden=length(beside) - length(without(beside, computing)),
        beside=length(beside),
    )


def _blame(causes: dict[str, list[Interval]], busy: dict[Lane, list[Interval]]) -> dict[Lane, float]:
    blamed = dict.fromkeys(_USUAL_SUPPLIERS, 0.0)
    for cause, waits in causes.items():
        for lane in _SUPPLIERS.get(cause, _USUAL_SUPPLIERS):
            unexplained = without(waits, busy[lane])
            blamed[lane] += length(waits) - length(unexplained)
            waits = unexplained
    return blamed


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into ones that neither touch nor overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Subtract `others` from `intervals`; both must be as `union` returns them."""
    left, first = [], 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for other_begin, other_end in others[first:]:
            if other_begin >= end:
                break
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals."""
    return sum(end - begin for begin, end in intervals)
