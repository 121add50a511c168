"""Draws recorded steps: when units computed, were copied and stepped, and what computing had to wait for.

    breakdown.py   a recording in numbers
    picture.py     a recording as a drawing
    drawing.py     a drawing as SVG or PNG
    page.py        a drawing as a page that can be zoomed
    chrome.py      a recording as Chrome trace
    scale.py       round numbers for axes

It depends on recordings only, not on how they are made.
"""

from __future__ import annotations

from pathlib import Path

from sp_lightning.pipeline import Recording
from sp_lightning.timeline.breakdown import Breakdown, break_down
from sp_lightning.timeline.chrome import to_chrome_trace
from sp_lightning.timeline.drawing import require_pillow, save_png
from sp_lightning.timeline.page import to_page
from sp_lightning.timeline.picture import draw_timeline, headline

__all__ = ["Breakdown", "break_down", "check_timeline_path", "headline", "write_timeline"]

_SUFFIXES = (".html", ".png", ".json")


def check_timeline_path(path: str | Path, argument: str = "path") -> Path:
    """Check a timeline's file name before anything is recorded.

    Args:
        path: The file.
        argument: Name of the user's argument, for messages.

    Raises:
        ImportError: If it is a PNG, and Pillow is not installed.
        ValueError: If its suffix is not one of the supported formats.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        kinds = "`.html` (a page), `.png` (a picture) or `.json` (a Chrome trace, for ui.perfetto.dev)"
        raise ValueError(f"`{argument}={str(path)!r}` must end in {kinds}.")
    if Path(path).suffix.lower() == ".png":
        require_pillow(f"`{argument}={str(path)!r}`")
    return Path(path)


def write_timeline(recording: Recording, path: str | Path, *, caption: str = "") -> None:
    """Write a recording to a file as a page, a picture or a trace, depending on the file's suffix.

    Args:
        recording: The recording that `with pipeline.record() as recording:` made, with at least one step.
        path: A file whose name ends in `.html` (a self-contained page to zoom into), `.png` (needs Pillow) or `.json`
            (a Chrome trace, for https://ui.perfetto.dev).
        caption: A description of what was recorded, shown in the picture.

    Raises:
        ImportError: If `path` ends in `.png` and Pillow is not installed.
        ValueError: If `path` has another suffix, or if no step was recorded.

    Example::

        with pipeline.record() as recording:
            train_some_steps()
        sp_lightning.write_timeline(recording, "timeline.html")
    """
    path = check_timeline_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        save_png(draw_timeline(recording, caption), path)
        return
    text = to_page(recording, caption) if path.suffix.lower() == ".html" else to_chrome_trace(recording, caption)
    path.write_text(text, encoding="utf-8")
