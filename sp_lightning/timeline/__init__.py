"""Recorded steps as numbers, as a trace and as a page: when units computed, were copied and stepped, and what waited.

It depends on recordings only, not on how they are made.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from sp_lightning.pipeline import Kind, Lane, Recording
from sp_lightning.timeline.breakdown import Breakdown, break_down

__all__ = ["Breakdown", "break_down", "check_timeline_path", "write_timeline"]


def _trace(recording: Recording, caption: str) -> dict[str, Any]:
    """Return a trace in Chrome's format, with a thread for each lane and times in microseconds."""
    threads = {lane: number for number, lane in enumerate(Lane, 1)}
    events: list[dict[str, Any]] = [
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


def _event(thread: int, name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "cat": category, **times}


def _page(trace: dict[str, Any], numbers: Breakdown) -> str:
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
        caption: A description of what was recorded, shown in the page.

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
