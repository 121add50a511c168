"""A recording in Chrome's trace format, a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from sp_lightning.pipeline import Kind, Lane, Recording


def to_chrome_trace(recording: Recording, caption: str = "") -> str:
    """Convert a recording to JSON, with a thread for each lane; times are in microseconds, as the format requires."""
    threads = {lane: number for number, lane in enumerate(Lane, 1)}
    events = [_event("M", 0, "process_name", args={"name": caption or "superpipeline"})]
    for lane, thread in threads.items():
        events.append(_event("M", thread, "thread_name", args={"name": lane.value}))
        events.append(_event("M", thread, "thread_sort_index", args={"sort_index": thread}))
    for number, (begin, end) in enumerate(recording.steps, 1):
        events.append(_event("X", 0, f"step {number}", cat="step", ts=begin * 1e6, dur=(end - begin) * 1e6))
    for span in recording.spans:
        name = f"waits for {span.name}" if span.kind is Kind.STALL else span.name
        more = {"args": {"bytes": span.nbytes}} if span.nbytes else {}
        moment, duration = span.begin * 1e6, (span.end - span.begin) * 1e6
        events.append(_event("X", threads[span.lane], name, cat=span.kind.value, ts=moment, dur=duration, **more))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(phase: str, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 1, "tid": thread, "name": name, **more}
