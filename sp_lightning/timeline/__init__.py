"""Draws recorded steps: when units computed, were copied and stepped, and what computing had to wait for.

It depends on recordings only, not on how they are made.
"""

from __future__ import annotations

from pathlib import Path

from sp_lightning.pipeline import Recording
from sp_lightning.timeline.breakdown import LANES, Breakdown, break_down
from sp_lightning.timeline.chrome import to_chrome_trace
from sp_lightning.timeline.page import to_page
from sp_lightning.timeline.picture import draw_timeline

__all__ = ["LANES", "Breakdown", "break_down", "check_timeline_path", "write_timeline"]

_FORMATS = {".html": to_page, ".svg": draw_timeline, ".json": to_chrome_trace}


def check_timeline_path(path: str | Path, argument: str = "path") -> Path:
    """Return a timeline's path; raise ValueError, naming the user's argument, if its suffix is not supported."""
    if Path(path).suffix.lower() not in _FORMATS:
        kinds = "`.html` (a page), `.svg` (a picture) or `.json` (a Chrome trace, for ui.perfetto.dev)"
        raise ValueError(f"`{argument}={str(path)!r}` must end in {kinds}.")
    return Path(path)


def write_timeline(recording: Recording, path: str | Path, *, caption: str = "") -> None:
    """Write a recording to a file as a page, a picture or a trace, depending on the file's suffix.

    Args:
        recording: The recording that `with pipeline.record() as recording:` made, with at least one step.
        path: A file whose name ends in `.html` (a self-contained page to zoom into), `.svg` (the same picture without a
            script) or `.json` (a Chrome trace, for https://ui.perfetto.dev).
        caption: A description of what was recorded, shown in the picture.

    Raises:
        ValueError: If `path` has another suffix, or if no step was recorded.

    Example::

        with pipeline.record() as recording:
            train_some_steps()
        sp_lightning.write_timeline(recording, "timeline.html")
    """
    path = check_timeline_path(path)
    written = _FORMATS[path.suffix.lower()](recording, caption)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written, encoding="utf-8")
