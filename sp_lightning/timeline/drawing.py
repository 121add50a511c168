"""A drawing: a few kinds of shapes with coordinates, rendered as SVG or PNG.

Timelines and plots decide what to draw; only this file knows picture formats. Colors have names, so that one drawing
serves light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

COLORS = {
    # name: (on a light page, on a dark page)
    "page": ("#ffffff", "#0f1419"),
    "lane": ("#f3f5f8", "#1a2129"),
    "grid": ("#dde2e8", "#2b343f"),
    "edge": ("#8a94a0", "#6b7683"),
    "text": ("#1b2027", "#e6eaef"),
    "muted": ("#66707c", "#94a0ad"),
    "on color": ("#ffffff", "#ffffff"),
    "on pale": ("#1b2027", "#1b2027"),
    "forward": ("#4f93f7", "#4f93f7"),
    "backward": ("#2559c7", "#2f68dc"),
    "stall": ("#e5343d", "#f2444d"),
    "load": ("#0e9384", "#12a594"),
    "fetch": ("#55c5b7", "#6fd0c4"),
    "sums": ("#9adbd2", "#a6e0d8"),
    "gradients": ("#f0922b", "#f39b3a"),
    "offload": ("#f3bb66", "#f3c47c"),
    "step": ("#7a52d1", "#8d68e0"),
    "add": ("#b39ce8", "#bca8ee"),
    "elsewhere": ("#c3cad3", "#4a5563"),
}

_SVG_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_PIXELS = 2  # pixels of a PNG per unit of the drawing: sharp on any screen
_GLYPH = 0.56  # width of an average letter, relative to the font size


@dataclass(frozen=True)
class Box:
    """A filled rectangle.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Width.
        height: Height.
        color: A name in `COLORS`.
        radius: Radius of its corners.
        label: Text in its middle, left out where the box is too narrow.
        label_color: A name in `COLORS`.
        data: Values for a page's script, as `data-...` attributes in SVG.
    """

    x: float
    y: float
    width: float
    height: float
    color: str
    radius: float = 0
    label: str = ""
    label_color: str = "on color"
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1
    role: str = ""


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    color: str


@dataclass(frozen=True)
class Text:
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12
    color: str = "text"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    role: str = ""


@dataclass
class Drawing:
    """A canvas with shapes, later ones on top."""

    width: float
    height: float
    shapes: list[Box | Line | Dot | Text] = field(default_factory=list)

    def add(self, *shapes: Box | Line | Dot | Text) -> None:
        """Put shapes on top."""
        self.shapes.extend(shapes)


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text without a font."""
    return len(text) * size * _GLYPH


def fits(box: Box, size: float) -> bool:
    """Tell whether a box has room for its label."""
    return bool(box.label) and text_width(box.label, size) + 4 <= box.width


def label_size(box: Box) -> float:
    """Return the font size for a box's label."""
    return min(12.0, 0.6 * box.height)


# ---------------------------------------------------------------------------------------------------------------- SVG


def style() -> str:
    """Return CSS that defines the colors for light and dark pages, and a class for each."""
    light, dark = ("".join(f"--{_css(name)}:{values[page]};" for name, values in COLORS.items()) for page in (0, 1))
    classes = "".join(
        f".f-{_css(name)}{{fill:var(--{_css(name)})}}.s-{_css(name)}{{stroke:var(--{_css(name)})}}" for name in COLORS
    )
    return (
        f":root{{{light}color-scheme:light dark}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"text{{font-family:{_SVG_FONT}}}{classes}"
    )


def to_svg(drawing: Drawing, styled: bool = True) -> str:
    """Render a drawing as an SVG element.

    Args:
        drawing: The drawing.
        styled: Whether the element includes its colors and background; False if the page around it has them.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(drawing.width)} {_number(drawing.height)}"'
        f' width="{_number(drawing.width)}" height="{_number(drawing.height)}">'
    )
    page = f"<style>{style()}</style>" + '<rect width="100%" height="100%" class="f-page"/>' if styled else ""
    return head + page + "\n".join(_svg(shape) for shape in drawing.shapes) + "</svg>"


def _svg(shape: Box | Line | Dot | Text) -> str:
    if isinstance(shape, Box):
        return _svg_box(shape)
    if isinstance(shape, Dot):
        place = f'cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{_number(shape.radius)}"'
        return f'<circle {place} class="f-{_css(shape.color)}"/>'
    role = f" {shape.role}" if shape.role else ""
    if isinstance(shape, Line):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        look = f'class="s-{_css(shape.color)}{role}" stroke-width="{_number(shape.width)}"'
        return f'<polyline points="{points}" fill="none" {look}/>'
    weight = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"{weight}'
        f' text-anchor="{shape.anchor}" class="f-{_css(shape.color)}{role}">{escape(shape.text)}</text>'
    )


def _svg_box(box: Box) -> str:
    data = "".join(f' data-{key}="{escape(str(value))}"' for key, value in (box.data or {}).items())
    radius = f' rx="{_number(box.radius)}"' if box.radius else ""
    shape = (
        f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" height="{_number(box.height)}"'
        f'{radius} class="f-{_css(box.color)}"/>'
    )
    if not box.label and not data:
        return shape
    size = label_size(box)
    hidden = "" if fits(box, size) else ' visibility="hidden"'
    label = (
        f'<text x="{_number(box.x + box.width / 2)}" y="{_number(box.y + box.height / 2 + 0.36 * size)}"'
        f' font-size="{_number(size)}" text-anchor="middle" class="f-{_css(box.label_color)}"{hidden}>'
        f"{escape(box.label)}</text>"
    )
    return f"<g{data}>{shape}{label if box.label else ''}</g>"


def _css(name: str) -> str:
    return name.replace(" ", "-")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ---------------------------------------------------------------------------------------------------------------- PNG


def require_pillow(what: str) -> None:
    """Raise unless PNGs can be drawn.

    Args:
        what: What needs Pillow, for the message.

    Raises:
        ImportError: If Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise ImportError(f"{what} needs Pillow: `pip install pillow`. A page (`.html`) needs nothing.")


def save_png(drawing: Drawing, path: Path) -> None:
    """Write the drawing as a PNG, in the colors of a light page.

    Raises:
        ImportError: If Pillow is not installed.
    """
    require_pillow(repr(str(path)))
    from PIL import Image, ImageDraw

    size = round(drawing.width * _PIXELS), round(drawing.height * _PIXELS)
    image = Image.new("RGB", size, COLORS["page"][0])
    pencil = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        _paint(pencil, shape)
    image.save(path)


def _paint(pencil: Any, shape: Box | Line | Dot | Text) -> None:
    color = COLORS[shape.color][0]
    if isinstance(shape, Box):
        corners = _corners(shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
        pencil.rounded_rectangle(corners, min(shape.radius * _PIXELS, (corners[2] - corners[0]) / 2), fill=color)
        size = label_size(shape)
        if fits(shape, size):
            middle = shape.x + shape.width / 2, shape.y + shape.height / 2 + 0.36 * size
            _paint_text(pencil, Text(*middle, shape.label, size, shape.label_color, "middle"))
    elif isinstance(shape, Dot):
        r = shape.radius
        pencil.ellipse(_corners(shape.x - r, shape.y - r, shape.x + r, shape.y + r), fill=color)
    elif isinstance(shape, Line):
        points = [(x * _PIXELS, y * _PIXELS) for x, y in shape.points]
        pencil.line(points, fill=color, width=max(1, round(shape.width * _PIXELS)), joint="curve")
    else:
        _paint_text(pencil, shape)


def _paint_text(pencil: Any, text: Text) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(text.size * _PIXELS)  # comes with Pillow: the same picture on every machine
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
    for shift in (0.0, 0.4) if text.bold else (0.0,):  # Pillow's font has no bold variant: drawn twice
        place = (text.x + shift) * _PIXELS, text.y * _PIXELS
        pencil.text(place, text.text, fill=COLORS[text.color][0], font=font, anchor=anchor)


def _corners(left: float, top: float, right: float, bottom: float) -> list[float]:
    """Convert a box's corners to pixels, at least one wide, so that short spans stay visible."""
    x0, y0, x1, y1 = (value * _PIXELS for value in (left, top, right, bottom))
    return [x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)]
