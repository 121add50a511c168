"""Shapes as SVG, in colors that differ between light and dark pages, and round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

COLORS = {
    # name: (on a light page, on a dark page)
    "page": ("#ffffff", "#0f1419"),
    "lane": ("#f3f5f8", "#1a2129"),
    "grid": ("#dde2e8", "#2b343f"),
    "edge": ("#8a94a0", "#6b7683"),
    "text": ("#1b2027", "#e6eaef"),
    "muted": ("#66707c", "#94a0ad"),
    "on-color": ("#ffffff", "#ffffff"),
    "on-pale": ("#1b2027", "#1b2027"),
    "forward": ("#4f93f7", "#4f93f7"),
    "backward": ("#2559c7", "#2f68dc"),
    "stall": ("#e5343d", "#f2444d"),
    "load": ("#0e9384", "#12a594"),
    "fetch": ("#55c5b7", "#6fd0c4"),
    "gradients": ("#f0922b", "#f39b3a"),
    "offload": ("#f3bb66", "#f3c47c"),
    "step": ("#7a52d1", "#8d68e0"),
    "add": ("#b39ce8", "#bca8ee"),
    "elsewhere": ("#c3cad3", "#4a5563"),
}

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_GLYPH = 0.56  # width of an average letter, relative to the font size


def box(x: float, y: float, width: float, height: float, color: str, radius: float = 0) -> str:
    """Draw a filled rectangle; `color` is a name in `COLORS`, here as everywhere."""
    corners = f' rx="{_number(radius)}"' if radius else ""
    place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {place}{corners} class="f-{color}"/>'


def line(points: Sequence[tuple[float, float]], color: str, width: float = 1) -> str:
    """Draw a line through points."""
    through = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return f'<polyline points="{through}" fill="none" class="s-{color}" stroke-width="{_number(width)}"/>'


def text(
    x: float,
    y: float,
    words: str,
    size: float = 12,
    color: str = "text",
    anchor: Literal["start", "middle", "end"] = "start",
    bold: bool = False,
) -> str:
    """Write a line of text; `y` is its baseline."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}"{weight} text-anchor="{anchor}"'
    return f'<text {place} class="f-{color}">{escape(words)}</text>'


def text_width(words: str, size: float) -> float:
    """Estimate the width of a text without a font."""
    return len(words) * size * _GLYPH


def style() -> str:
    """Return CSS for light and dark pages: a variable, a class of fills and one of strokes for each color."""
    light, dark = ("".join(_color(name, shades[page]) for name, shades in COLORS.items()) for page in (0, 1))
    dark = f"@media(prefers-color-scheme:dark){{{dark}}}"
    return f":root{{color-scheme:light dark}}text{{font-family:{_FONT}}}{light}{dark}"


def _color(name: str, shade: str) -> str:
    # Not `fill:var(...)`, which many programs besides browsers do not know.
    return f":root{{--{name}:{shade}}}.f-{name}{{fill:{shade}}}.s-{name}{{stroke:{shade}}}"


def picture(width: float, height: float, shapes: Iterable[str], styled: bool = True) -> str:
    """Put shapes, later ones on top, into an SVG element; with `style()` and a background unless the page has them."""
    page = f'<style>{style()}</style><rect width="100%" height="100%" class="f-page"/>' if styled else ""
    size = f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{page}' + "\n".join(shapes) + "</svg>\n"


def round_steps(span: float, count: int = 10) -> list[float]:
    """Return marks from zero to `span`, about `count` of them, at steps of one, two or five times a power of ten."""
    if span <= 0:
        return [0.0]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    return [index * step for index in range(int(span / step * (1 + 1e-9)) + 1)]


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
