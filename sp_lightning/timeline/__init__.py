"""Draws recorded steps: when units computed, were copied and stepped, and what computing had to wait for.

It depends on recordings only, not on how they are made.
"""

from __future__ import annotations

import json
import os
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sp_lightning.pipeline import Kind, Lane, Recording
from sp_lightning.timeline.breakdown import LANES, Breakdown, break_down
from sp_lightning.timeline.picture import PLOT_LEFT, PLOT_RIGHT, draw_timeline

__all__ = [
    "LANES",
    "Breakdown",
    "break_down",
    "check_timeline_path",
    "why_not_written",
    "write_timeline",
]


def _page(recording: Recording, caption: str = "") -> str:
    """Return a page that loads nothing from elsewhere: the picture, with a script to zoom, to pan and for tooltips."""
    numbers = break_down(recording)
    steps = [begin - numbers.begin for begin, _ in recording.steps]
    parts = {
        "title": escape(f"Timeline {caption}".strip()),
        "drawing": draw_timeline(recording, caption),
        "plot": json.dumps({"left": PLOT_LEFT, "right": PLOT_RIGHT, "seconds": numbers.seconds, "steps": steps}),
    }
    page = files("sp_lightning.timeline").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], page)


def _chrome_trace(recording: Recording, caption: str = "") -> str:
    """Return a trace in Chrome's format, with a thread for each lane and times in microseconds."""
    threads = {lane: number for number, lane in enumerate(Lane, 1)}
    events = [_event("M", 0, "process_name", args={"name": caption or "superpipeline"})]
    for lane, thread in threads.items():
        events.append(_event("M", thread, "thread_name", args={"name": lane.value}))
        events.append(_event("M", thread, "thread_sort_index", args={"sort_index": thread}))
    for number, (begin, end) in enumerate(recording.steps, 1):
        events.append(_work(0, f"step {number}", "step", begin, end))
    for span in recording.spans:
        name = f"waits for {span.name}" if span.kind is Kind.STALL else span.name
        event = _work(threads[span.lane], name, span.kind.value, span.begin, span.end)
        if span.nbytes:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(phase: str, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 1, "tid": thread, "name": name, **more}


def _work(thread: int, name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    return _event("X", thread, name, cat=category, ts=begin * 1e6, dur=(end - begin) * 1e6)


_FORMATS = {".html": _page, ".svg": draw_timeline, ".json": _chrome_trace}


def check_timeline_path(path: str | Path, argument: str = "path") -> Path:
    """Return a timeline's path; raise ValueError, naming the user's argument, if its suffix is not supported."""
    if Path(path).suffix.lower() not in _FORMATS:
        kinds = "`.html` (a page), `.svg` (a picture) or `.json` (a Chrome trace, for ui.perfetto.dev)"
        raise ValueError(f"`{argument}={str(path)!r}` must end in {kinds}.")
    return Path(path)


def why_not_written(path: Path) -> str | None:
    """Return why no timeline can be written to a path, whose folder is made if need be; None if one can."""
    if path.is_dir():
        return "it is a folder"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"{folder} is no folder"
    place = path if path.exists() else folder
    return None if os.access(place, os.W_OK) else f"{place} may not be written to"


def write_timeline(recording: Recording, path: str | Path, *, caption: str = "") -> None:
    """Write a recording to a file as a page, a picture or a trace, depending on the file's suffix.

    Args:
        recording: The recording that `with pipeline.record() as recording:` made, with at least one step.
        path: A file whose name ends in `.html` (a self-contained page to zoom into), `.svg` (the same picture without a
            script) or `.json` (a Chrome trace, for https://ui.perfetto.dev).
        caption: A description of what was recorded, shown in the picture.

    Raises:
        ValueError: If `path` has another suffix, or if no step was recorded.

    Examples:
        >>> with pipeline.record() as recording:
        ...     train_some_steps()
        >>> sp_lightning.write_timeline(recording, "timeline.html")
    """
    path = check_timeline_path(path)
    written = _FORMATS[path.suffix.lower()](recording, caption)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written, encoding="utf-8")
