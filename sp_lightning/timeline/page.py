"""The timeline as a self-contained page: the drawing as inline SVG, with zooming, panning and tooltips.

Without JavaScript the page shows the whole picture. Each piece of work carries its times (`data-begin`, `data-end`),
and a script moves it when the user zooms or pans. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files

from sp_lightning.pipeline import Recording
from sp_lightning.timeline.breakdown import break_down
from sp_lightning.timeline.drawing import style, to_svg
from sp_lightning.timeline.picture import PLOT_LEFT, PLOT_RIGHT, draw_timeline


def to_page(recording: Recording, caption: str = "") -> str:
    """Convert a recording to a self-contained HTML page.

    Args:
        recording: A finished recording of at least one step.
        caption: A description of what was recorded.

    Raises:
        ValueError: If the recording has no step.
    """
    numbers = break_down(recording)
    plot = {"left": PLOT_LEFT, "right": PLOT_RIGHT, "seconds": numbers.seconds}
    steps = [begin - numbers.begin for begin, _ in recording.steps]
    parts = {
        "title": escape(f"Timeline {caption}".strip()),
        "style": style(),
        "drawing": to_svg(draw_timeline(recording, caption), styled=False),
        "plot": json.dumps({**plot, "steps": steps}),
    }
    page = files("sp_lightning.timeline").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], page)
