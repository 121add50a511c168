"""A recording in numbers: how busy each lane was, what computing waited for, and which lane is the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from sp_lightning.pipeline import Kind, Lane, Recording, Span

LANES = {
    Lane.COMPUTE: "compute",
    Lane.TO_DEVICE: "host to device",
    Lane.TO_HOST: "device to host",
    Lane.VISIT: "visits",
    Lane.HOST: "host",
}
"""Names of the lanes in pictures and sentences."""

# the share of the time from which on computing itself is the bottleneck
_COMPUTES_ALL_THE_TIME = 0.9
_BESIDE_COMPUTING = (Lane.TO_DEVICE, Lane.TO_HOST, Lane.VISIT, Lane.HOST)
# what is busy where a lane is the bottleneck
_BOTTLENECKS = {
    Lane.TO_DEVICE: "the way from host to device",
    Lane.TO_HOST: "the way from device to host",
    Lane.VISIT: "the step of units that visit the device",
    Lane.HOST: "work on the host",
}


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the recorded steps went. Times are in seconds, for all steps together."""

    begin: float  # of the first step
    end: float  # of the last step
    steps: int
    busy: dict[Lane, float]  # how long each lane worked; stalls are not work
    nbytes: dict[Lane, int]  # moved by each lane
    # how long each kind of work took; computing does not include the stalls in it
    kinds: dict[Kind, float]
    # how long computing waited for "weights", "optimizer", "gradients" or "activations"
    stalls: dict[str, float]
    # the share of copies, visits and work on the host that ran while the device computed; 1 if there was none
    overlap: float

    @property
    def seconds(self) -> float:
        """The time of all steps together."""
        return self.end - self.begin

    @property
    def elsewhere(self) -> float:
        """How long no unit computed or waited for a copy: the loss, the loop, data."""
        return max(0.0, self.seconds - self.busy[Lane.COMPUTE] - self.kinds[Kind.STALL])

    def share(self, seconds: float) -> float:
        """Return the share of the total time that some seconds are."""
        return seconds / self.seconds if self.seconds else 0.0

    def rate(self, lane: Lane) -> float:
        """Return the bytes per second that a lane moved while it worked."""
        return self.nbytes[lane] / self.busy[lane] if self.busy[lane] else 0.0

    @property
    def bottleneck(self) -> Lane | None:
        """The lane that limits a step: computing or, if it waits, the busiest other one; None if neither does."""
        if self.share(self.busy[Lane.COMPUTE]) >= _COMPUTES_ALL_THE_TIME:
            return Lane.COMPUTE
        if self.kinds[Kind.STALL] <= self.elsewhere:
            return None
        return max(_BESIDE_COMPUTING, key=lambda lane: self.busy[lane])

    def headline(self) -> str:
        """Say in a sentence or two where the time went."""
        device = f"The device computes {self.share(self.busy[Lane.COMPUTE]):.0%} of the time"
        shares = {cause: self.share(seconds) for cause, seconds in self.stalls.items()}
        causes = sorted(shares, key=lambda cause: -shares[cause])
        waits = [f"{shares[cause]:.0%} for {cause}" for cause in causes if shares[cause] > 0.01]
        if waits:
            device += f", and waits {' and '.join(waits)}."
        else:
            device += ", and hardly ever waits for a copy."
        lane = self.bottleneck
        if lane is None:
            lost = f"{self.share(self.elsewhere):.0%}"
            elsewhere = "no unit computes: loss, data, loop or optimizer"
            return f"{device} In {lost} of the time {elsewhere}."
        if lane is Lane.COMPUTE:
            return f"{device} Computing is the bottleneck."
        busy = f"{self.share(self.busy[lane]):.0%}"
        return f"{device} The bottleneck is {_BOTTLENECKS[lane]}, busy {busy} of the time."

    def metrics(self) -> dict[str, float]:
        """Return what the callback logs of recorded steps, for one step (docs/timeline.md)."""
        waits = {
            f"stall_seconds_{cause}": self.stalls.get(cause, 0.0) / self.steps
            for cause in ("weights", "optimizer", "gradients", "activations")
        }
        return {
            "step_seconds": self.seconds / self.steps,
            "compute_share": self.share(self.busy[Lane.COMPUTE]),
            "stall_seconds": self.kinds[Kind.STALL] / self.steps,
            **waits,
            "to_device_gb_per_s": self.rate(Lane.TO_DEVICE) / 1e9,
            "to_host_gb_per_s": self.rate(Lane.TO_HOST) / 1e9,
            "visit_seconds": self.busy[Lane.VISIT] / self.steps,
            "host_seconds": self.busy[Lane.HOST] / self.steps,
            "overlap": self.overlap,
        }


def break_down(recording: Recording) -> Breakdown:
    """Add up the times of a finished recording's steps; there must be one. Work outside of them does not count."""
    if not recording.steps:
        raise ValueError("The recording has no step: surround at least one forward with `with pipeline.record()`.")
    begin, end = recording.steps[0][0], recording.steps[-1][1]
    spans = [span for span in recording.spans if max(begin, span.begin) < min(end, span.end)]
    nbytes = dict.fromkeys(Lane, 0)
    for span in spans:
        inside = min(end, span.end) - max(begin, span.begin)
        nbytes[span.lane] += round(span.nbytes * inside / (span.end - span.begin))
    busy = dict.fromkeys(Lane, 0.0)
    kinds = dict.fromkeys(Kind, 0.0)
    stalls: dict[str, float] = {}
    beside = 0.0  # while lanes beside computing work
    hidden = 0.0  # the part of it in which the device computes
    for seconds, work, causes in _stretches(spans, begin, end):
        lanes = {kind.lane for kind in work if kind is not Kind.STALL}
        for kind in work:
            kinds[kind] += seconds
        for lane in lanes:
            busy[lane] += seconds
        for cause in causes:
            stalls[cause] = stalls.get(cause, 0.0) + seconds
        if lanes.intersection(_BESIDE_COMPUTING):
            beside += seconds
            if Lane.COMPUTE in lanes:
                hidden += seconds
    overlap = hidden / beside if beside else 1.0
    return Breakdown(begin, end, len(recording.steps), busy, nbytes, kinds, stalls, overlap)


def _stretches(spans: list[Span], begin: float, end: float) -> Iterator[tuple[float, set[Kind], set[str]]]:
    """Yield stretches in which nothing begins or ends: their length, the work at that time, and causes of stalls.

    While computing waits, it does not compute, although a forward or backward has begun.
    """
    changes = [(max(begin, span.begin), 1, span) for span in spans]
    changes += [(min(end, span.end), -1, span) for span in spans]
    changes.sort(key=lambda change: change[0])
    running: Counter[Kind] = Counter()
    waiting: Counter[str] = Counter()
    for (moment, change, span), (following, *_) in pairwise(changes):
        running[span.kind] += change
        if span.kind is Kind.STALL:
            waiting[span.name] += change
        if moment < following:
            work = {kind for kind, count in running.items() if count}
            causes = {cause for cause, count in waiting.items() if count}
            if causes:
                work -= {Kind.FORWARD, Kind.BACKWARD}
            yield following - moment, work, causes
