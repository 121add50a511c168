"""A recording in Chrome's trace format, a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from sp_lightning.pipeline import Kind, Lane, Recording

_PROCESS = 1


def to_chrome_trace(recording: Recording, caption: str = "") -> str:
    """Convert a recording to JSON, with a thread for each lane; times are in microseconds, as the format requires."""
    threads = {lane: number for number, lane in enumerate(Lane, 1)}
    events: list[dict[str, Any]] = [_name("process_name", 0, caption or "superpipeline")]
    events += [_name("thread_name", thread, lane.value) for lane, thread in threads.items()]
    events += [
        {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        for thread in threads.values()
    ]
    for number, (begin, end) in enumerate(recording.steps, 1):
        events.append(_complete(0, f"step {number}", "step", begin, end, {}))
    for span in recording.spans:
        name = f"waits for {span.name}" if span.kind is Kind.STALL else span.name
        more = {"bytes": span.nbytes} if span.nbytes else {}
        events.append(_complete(threads[span.lane], name, span.kind.value, span.begin, span.end, more))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": {"name": name}}


def _complete(thread: int, name: str, kind: str, begin: float, end: float, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "name": name,
        "cat": kind,
        "ts": begin * 1e6,
        "dur": (end - begin) * 1e6,
        "args": {"kind": kind, **more},
    }
