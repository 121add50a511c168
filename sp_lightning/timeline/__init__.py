"""Recorded steps as numbers, as a trace and as a page: the times of computing, copies, updates and waiting.

It depends on recordings only, not on how they are made.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from sp_lightning.pipeline import Kind, Lane, Recording, Span

__all__ = ["Breakdown", "break_down", "check_timeline_path", "write_timeline"]

JsonObject: TypeAlias = dict[str, Any]

# the share of the time from which on computing itself is the bottleneck
_COMPUTES_ALL_THE_TIME = 0.9
# the busy resource where a lane is the bottleneck
_BOTTLENECKS = {
    Lane.TO_DEVICE: "copying from CPU memory to the GPU",
    Lane.TO_HOST: "copying from the GPU to CPU memory",
    Lane.VISIT: "optimizer updates on the GPU",
    Lane.HOST: "work on the CPU",
    Lane.FROM_DRIVE: "reading optimizer state from the drive",
    Lane.TO_DRIVE: "writing optimizer state to the drive",
}


@dataclass(frozen=True)
class Breakdown:
    """The use of the time of the recorded steps. Times are in seconds, for all steps together."""

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
        """The time in which no unit computed or waited for a copy: the loss, the loop, data."""
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
        said = f"Layers compute {self.share(self.busy[Lane.COMPUTE]):.0%} of the time"
        longest = sorted(self.stalls.items(), key=lambda stall: -stall[1])
        waits = [f"{self.share(each):.0%} for {cause}" for cause, each in longest if self.share(each) > 0.01]
        said += f", and wait {' and '.join(waits)}." if waits else ", and hardly ever wait for a copy."
        lane = self.bottleneck
        if lane is None:
            elsewhere = "of the time no layer computes: loss, data, loop or optimizer"
            return f"{said} In {self.share(self.elsewhere):.0%} {elsewhere}."
        if lane is Lane.COMPUTE:
            return f"{said} Computing is the bottleneck."
        busy = f"{self.share(self.busy[lane]):.0%}"
        return f"{said} The bottleneck is {_BOTTLENECKS[lane]}, busy {busy} of the time."

    def metrics(self) -> dict[str, float]:
        """Return the metrics of recorded steps that the callback logs, for one step (docs/timeline.md)."""
        return {
            "step_seconds": self.seconds / self.steps,
            "compute_share": self.share(self.busy[Lane.COMPUTE]),
            "stall_seconds": self.stalled / self.steps,
            **{
                f"stall_seconds_{cause}": self.stalls.get(cause, 0.0) / self.steps
                for cause in ("weights", "optimizer", "gradients", "activations")
            },
            "to_device_gb_per_s": self.rate(Lane.TO_DEVICE) / 1e9,
            "to_host_gb_per_s": self.rate(Lane.TO_HOST) / 1e9,
            "visit_seconds": self.busy[Lane.VISIT] / self.steps,
            "host_seconds": self.busy[Lane.HOST] / self.steps,
            "overlap": self.overlap,
        }


def break_down(recording: Recording) -> Breakdown:
    """Add up the times of a finished recording's steps; there must be one. Work outside of them does not count.

    While computing waits, it does not compute, although a forward or backward has begun. The time of both, less the
    stalls, is computing.
    """
    if not recording.steps:
        raise ValueError("The recording has no step. Surround at least one forward with `with pipeline.record()`.")
    begin, end = recording.steps[0][0], recording.steps[-1][1]
    spans = [span for span in recording.spans if max(begin, span.begin) < min(end, span.end)]
    nbytes = {lane: sum(span.nbytes for span in spans if span.lane is lane) for lane in Lane}

    def covered(kinds: Set[Kind]) -> float:
        return _covered([span for span in spans if span.kind in kinds], begin, end)

    stalls = [span for span in spans if span.kind is Kind.STALL]
    stalled = _covered(stalls, begin, end)
    busy = {lane: covered({kind for kind in Kind if kind.lane is lane}) for lane in Lane}
    busy[Lane.COMPUTE] -= stalled
    beside = {kind for kind in Kind if kind.lane is not Lane.COMPUTE}
    hidden = busy[Lane.COMPUTE] + covered(beside | {Kind.STALL}) - covered(set(Kind))
    overlap = hidden / covered(beside) if covered(beside) else 1.0
    causes = {
        cause: _covered([span for span in stalls if span.name == cause], begin, end)
        for cause in {span.name for span in stalls}
    }
    return Breakdown(begin, end, len(recording.steps), busy, nbytes, stalled, causes, overlap)


def _covered(spans: list[Span], begin: float, end: float) -> float:
    """Return how long any of these spans, sorted as they were recorded, was under way between two moments."""
    seconds = 0.0
    reached = begin
    for span in spans:
        seconds += max(0.0, min(end, span.end) - max(reached, span.begin))
        reached = max(reached, span.end)
    return seconds


# --------------------------------------------------------------------------------------------------- a trace and a page


def _trace(recording: Recording, caption: str) -> JsonObject:
    """Return a trace in Chrome's format, with a thread for each lane and times in microseconds."""
    threads = {lane: number for number, lane in enumerate(Lane, 1)}
    events: list[JsonObject] = [
        {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": lane.value}}
        for lane, thread in threads.items()
    ]
    for number, (begin, end) in enumerate(recording.steps, 1):
        events.append(_event(0, f"step {number}", "step", begin, end))
    for span in recording.spans:
        name = f"waits for {span.name}" if span.kind is Kind.STALL else span.name
        event = _event(threads[span.lane], name, span.kind.label, span.begin, span.end)
        events.append({**event, "args": {"bytes": span.nbytes}})
    return {"traceEvents": events, "otherData": {"caption": caption}}


def _event(thread: int, name: str, category: str, begin: float, end: float) -> JsonObject:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": begin * 1e6,
        "dur": (end - begin) * 1e6,
    }


def _page(trace: JsonObject, numbers: Breakdown) -> str:
    """Return a page that loads nothing from elsewhere, and draws the trace."""
    bottleneck = numbers.bottleneck
    data = {
        **asdict(numbers),
        "busy": {lane.value: seconds for lane, seconds in numbers.busy.items()},
        "nbytes": {lane.value: nbytes for lane, nbytes in numbers.nbytes.items()},
        "bottleneck": None if bottleneck is None else bottleneck.value,
        "headline": numbers.headline(),
        "trace": trace,
    }
    page = files("sp_lightning.timeline").joinpath("page.html").read_text(encoding="utf-8")
    written = json.dumps(data).replace("<", "\\u003c")  # a tag would end the script
    return page.replace("@data@", written)


def check_timeline_path(path: str | Path, argument: str = "path") -> Path:
    """Return a timeline's path; raise ValueError, naming the user's argument, if its suffix is not supported."""
    if Path(path).suffix.lower() not in (".html", ".json"):
        kinds = "`.html` (a page) or `.json` (a Chrome trace, for ui.perfetto.dev)"
        raise ValueError(f"`{argument}={str(path)!r}` must end in {kinds}.")
    return Path(path)


def write_timeline(recording: Recording, path: str | Path, *, caption: str = "") -> None:
    """Write a recording to a file as a page or a trace, depending on the file's suffix.

    Args:
        recording: The recording that `with pipeline.record() as recording:` made, with at least one step.
        path: A file whose name ends in `.html` (a self-contained page to zoom into) or `.json` (a Chrome trace, for
            https://ui.perfetto.dev).
        caption: A description of the recording, shown in the page.

    Raises:
        ValueError: If `path` has another suffix, or if no step was recorded.

    Examples:
        >>> with pipeline.record() as recording:
        ...     train_some_steps()
        >>> sp_lightning.write_timeline(recording, "timeline.html")
    """
    path = check_timeline_path(path)
    numbers = break_down(recording)
    trace = _trace(recording, caption)
    written = json.dumps(trace) if path.suffix.lower() == ".json" else _page(trace, numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written, encoding="utf-8")
