"""A recording in numbers: how busy each lane was, what computing waited for, and which lane is the bottleneck."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from sp_lightning.pipeline import Kind, Lane, Recording, Span

# the share of the time from which on computing itself is the bottleneck
_COMPUTES_ALL_THE_TIME = 0.9
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
    stalled: float  # how long computing waited
    # the same for each cause: "weights", "optimizer", "gradients", "activations"
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
        return max(0.0, self.seconds - self.busy[Lane.COMPUTE] - self.stalled)

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
        if self.stalled <= self.elsewhere:
            return None
        return max(_BOTTLENECKS, key=lambda lane: self.busy[lane])

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
            "stall_seconds": self.stalled / self.steps,
            **waits,
            "to_device_gb_per_s": self.rate(Lane.TO_DEVICE) / 1e9,
            "to_host_gb_per_s": self.rate(Lane.TO_HOST) / 1e9,
            "visit_seconds": self.busy[Lane.VISIT] / self.steps,
            "host_seconds": self.busy[Lane.HOST] / self.steps,
            "overlap": self.overlap,
        }


def break_down(recording: Recording) -> Breakdown:
    """Add up the times of a finished recording's steps; there must be one. Work outside of them does not count.

    While computing waits, it does not compute, although a forward or backward has begun: what both cover, less the
    stalls, is computing.
    """
    if not recording.steps:
        raise ValueError("The recording has no step: surround at least one forward with `with pipeline.record()`.")
    begin, end = recording.steps[0][0], recording.steps[-1][1]
    spans = [span for span in recording.spans if max(begin, span.begin) < min(end, span.end)]
    nbytes = {lane: sum(span.nbytes for span in spans if span.lane is lane) for lane in Lane}

    def covered(kinds: Set[Kind]) -> float:
        return _covered([span for span in spans if span.kind in kinds], begin, end)

    stalled = covered({Kind.STALL})
    busy = {lane: covered({kind for kind in Kind if kind.lane is lane}) for lane in Lane}
    busy[Lane.COMPUTE] -= stalled
    beside = {kind for kind in Kind if kind.lane is not Lane.COMPUTE}
    hidden = busy[Lane.COMPUTE] + covered(beside | {Kind.STALL}) - covered(set(Kind))
    overlap = hidden / covered(beside) if covered(beside) else 1.0
    stalls = {
        cause: _covered([span for span in spans if (span.kind, span.name) == (Kind.STALL, cause)], begin, end)
        for cause in {span.name for span in spans if span.kind is Kind.STALL}
    }
    return Breakdown(begin, end, len(recording.steps), busy, nbytes, stalled, stalls, overlap)


def _covered(spans: list[Span], begin: float, end: float) -> float:
    """Return how long there was any of these between two moments."""
    seconds = 0.0
    reached = begin
    for span in sorted(spans, key=lambda span: span.begin):
        seconds += max(0.0, min(end, span.end) - max(reached, span.begin))
        reached = max(reached, span.end)
    return seconds
