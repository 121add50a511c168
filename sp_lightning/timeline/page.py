"""The timeline as a self-contained page: the picture, and a script in page.html that zooms, pans and shows tooltips."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files

from sp_lightning.pipeline import Recording
from sp_lightning.timeline.breakdown import break_down
from sp_lightning.timeline.picture import PLOT_LEFT, PLOT_RIGHT, draw_timeline
from sp_lightning.timeline.svg import style


def to_page(recording: Recording, caption: str = "") -> str:
    """Convert a recording to HTML that loads nothing from elsewhere."""
    numbers = break_down(recording)
    steps = [begin - numbers.begin for begin, _ in recording.steps]
    parts = {
        "title": escape(f"Timeline {caption}".strip()),
        "style": style(),
        "drawing": draw_timeline(recording, caption, styled=False),
        "plot": json.dumps({"left": PLOT_LEFT, "right": PLOT_RIGHT, "seconds": numbers.seconds, "steps": steps}),
    }
    page = files("sp_lightning.timeline").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], page)
