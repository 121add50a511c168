"""A recorded step as a picture: what computed, copied and stepped when, and what computing had to wait for.

    breakdown.py   a recording in numbers
    picture.py     a recording as a drawing
    drawing.py     a drawing as SVG or PNG
    page.py        a drawing as a page that can be zoomed
    chrome.py      a recording as Chrome trace
    scale.py       round numbers for axes

Knows recordings, and nothing of how they are made.
"""

from __future__ import annotations

from pathlib import Path

from sp_lightning.pipeline import Recording, readable_seconds
from sp_lightning.timeline.breakdown import Breakdown, break_down
from sp_lightning.timeline.chrome import to_chrome_trace
from sp_lightning.timeline.drawing import require_pillow, save_png
from sp_lightning.timeline.page import to_page
from sp_lightning.timeline.picture import draw_timeline, headline

__all__ = ["Breakdown", "break_down", "check_timeline_path", "headline", "readable_seconds", "write_timeline"]

_SUFFIXES = (".html", ".png", ".json")


def check_timeline_path(path: str | Path, argument: str = "path") -> Path:
    """Check where a timeline is to be written, before anything is recorded.

    Args:
        path: The file.
        argument: What the user calls it.

    Raises:
        ImportError: If it is a PNG, and Pillow is not installed.
        ValueError: If its name does not say what kind of file it is.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        kinds = "`.html` (a page), `.png` (a picture) or `.json` (a Chrome trace, for ui.perfetto.dev)"
        raise ValueError(f"`{argument}={str(path)!r}` must end in {kinds}.")
    if Path(path).suffix.lower() == ".png":
        require_pillow(f"`{argument}={str(path)!r}`")
    return Path(path)


def write_timeline(recording: Recording, path: str | Path, *, caption: str = "") -> None:
    """Write what was recorded as a page, a picture or a trace, as the file's name says.

    Args:
        recording: What `with pipeline.record() as recording:` gave, with at least one step.
        path: A file whose name ends in `.html` (a page to zoom into, in one file), `.png` (needs Pillow) or `.json`
            (a Chrome trace, for https://ui.perfetto.dev).
        caption: What was recorded, for whoever sees it later.

    Raises:
        ImportError: If a PNG is asked for and Pillow is not installed.
        ValueError: If the name ends otherwise, or if no step was recorded.

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
