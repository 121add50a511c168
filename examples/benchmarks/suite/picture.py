"""Draws a recording as SVG: a headline, where the device's time went, and a row for each lane that did anything.

Below that stand the shapes and colors that it is made of, which differ between light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from html import escape
from typing import Literal

from sp_lightning.pipeline import Kind, Lane, Recording, Span, readable_bytes
from sp_lightning.planning.report import UNITS_OF_TIME, readable_seconds
from sp_lightning.timeline import Breakdown, break_down

LANES = {
    Lane.COMPUTE: "compute",
    Lane.TO_DEVICE: "host to device",
    Lane.TO_HOST: "device to host",
    Lane.VISIT: "visits",
    Lane.HOST: "host",
}
WIDTH = 1280
MARGIN = 28
PLOT_LEFT, PLOT_RIGHT = 250, WIDTH - MARGIN
_STRIP_TOP, _STRIP_HEIGHT = 104, 30
_LANES_TOP, _LANE_HEIGHT, _LANE_GAP = 196, 58, 12
_LABEL = 12  # font size of labels in bars
_LEGEND_LINE = 20
_STEP_ROOM = 56  # width of the words "step 100"

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.STALL: "device waits",
    Kind.LOAD: "weights",
    Kind.FETCH: "activations, back",
    Kind.GRADIENTS: "gradients",
    Kind.OFFLOAD: "activations, out",
    Kind.STATE_UP: "optimizer state, up",
    Kind.STATE_DOWN: "optimizer state, down",
    Kind.VISIT: "optimizer step in a visit",
    Kind.STEP: "optimizer step",
    Kind.ADD: "gradients added up",
}
_PALE = {Kind.FETCH, Kind.OFFLOAD, Kind.ADD, Kind.GRADIENTS}  # their colors need dark letters

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
    "state-up": ("#17657f", "#2383a3"),
    "state-down": ("#b5541c", "#c9652b"),
    "visit": ("#a8409f", "#bb55b2"),
    "step": ("#7a52d1", "#8d68e0"),
    "add": ("#b39ce8", "#bca8ee"),
    "elsewhere": ("#c3cad3", "#4a5563"),
}

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_GLYPH = 0.56  # width of an average letter, relative to the font size


def draw_timeline(recording: Recording, caption: str = "") -> str:
    """Draw the steps of a finished recording, of which there is at least one, as an SVG element."""
    numbers = break_down(recording)
    shown = [span for span in recording.spans if numbers.begin < span.end and span.begin < numbers.end]
    shown.sort(key=lambda span: (span.kind is Kind.STALL, span.begin, -span.end))  # stalls on top
    lanes = {Lane.COMPUTE, *(span.lane for span in shown)}
    shapes = [*_head(numbers, caption), *_strip(numbers)]
    tops: dict[Lane, int] = {}
    bottom = _LANES_TOP
    for lane in (lane for lane in Lane if lane in lanes):
        tops[lane] = bottom
        shapes += _lane(lane, bottom, numbers)
        bottom += _LANE_HEIGHT + _LANE_GAP
    shapes += _axis(recording, numbers, bottom)
    shapes += [_bar(span, tops[span.lane], numbers) for span in shown]
    bottom += 54
    for row in _legend_rows({span.kind for span in shown}):
        shapes += _legend(row, bottom)
        bottom += _LEGEND_LINE
    return picture(WIDTH, bottom + 4, shapes)


def where_time_goes(numbers: Breakdown) -> list[tuple[str, str, float]]:
    """Return what the device did, as names, colors and seconds that add up to the total time."""
    parts = [
        ("computes", "forward", numbers.busy[Lane.COMPUTE]),
        *((f"waits for {cause}", "stall", numbers.stalls[cause]) for cause in sorted(numbers.stalls)),
        ("elsewhere", "elsewhere", numbers.elsewhere),
    ]
    return [part for part in parts if part[2] > 0]


def _head(numbers: Breakdown, caption: str) -> Iterator[str]:
    step = readable_seconds(numbers.seconds / numbers.steps)
    title = f"{numbers.steps} steps of {step}" if numbers.steps > 1 else f"One step: {step}"
    yield text(MARGIN, 44, title, 24, bold=True)
    yield text(WIDTH - MARGIN, 44, caption, 13, "muted", "end")
    yield text(MARGIN, 74, numbers.headline(), 15)


def _strip(numbers: Breakdown) -> Iterator[str]:
    """Draw a strip with the shares of what the device did; names that do not fit into it stand below."""
    parts = where_time_goes(numbers)
    total = sum(seconds for _, _, seconds in parts)
    x = float(MARGIN)
    free = 0.0  # where the words below the strip end
    for name, color, seconds in parts:
        width = seconds / total * (WIDTH - 2 * MARGIN)
        words = f"{name} {numbers.share(seconds):.0%}"
        yield box(x, _STRIP_TOP, width - 1.5, _STRIP_HEIGHT, color, 3)
        if text_width(words, _LABEL) + 4 <= width:
            letters = "text" if color == "elsewhere" else "on-color"
            yield _centered(x + width / 2, _STRIP_TOP + _STRIP_HEIGHT / 2, words, letters)
        elif numbers.share(seconds) >= 0.01 and x >= free:
            middle = min(x + width / 2, WIDTH - MARGIN - text_width(words, 11) / 2)
            yield text(middle, _STRIP_TOP + _STRIP_HEIGHT + 16, words, 11, "muted", "middle")
            free = middle + text_width(words, 11)
        x += width


def _lane(lane: Lane, top: float, numbers: Breakdown) -> Iterator[str]:
    """Draw a lane's name, how busy it was, and the background for its work."""
    yield text(MARGIN, top + 19, LANES[lane], 14, bold=True)
    color = "edge"
    if lane is numbers.bottleneck:
        color = "backward" if lane is Lane.COMPUTE else "stall"
        yield text(PLOT_LEFT - 16, top + 19, "bottleneck", 11, color, "end", bold=True)
    if numbers.nbytes[lane] and lane in (Lane.TO_DEVICE, Lane.TO_HOST):
        moved = readable_bytes(round(numbers.nbytes[lane] / numbers.steps))
        rate = readable_bytes(round(numbers.rate(lane)))
        yield text(MARGIN, top + 36, f"{moved} at {rate}/s", 11, "muted")
    busy = numbers.share(numbers.busy[lane])
    whole = PLOT_LEFT - MARGIN - 60
    yield box(MARGIN, top + _LANE_HEIGHT - 10, whole, 5, "grid", 2.5)
    yield box(MARGIN, top + _LANE_HEIGHT - 10, max(2, whole * busy), 5, color, 2.5)
    yield text(PLOT_LEFT - 16, top + _LANE_HEIGHT - 4, f"{busy:.0%}", 12, "text", "end", bold=True)
    yield box(PLOT_LEFT, top, PLOT_RIGHT - PLOT_LEFT, _LANE_HEIGHT, "lane", 4)


def _axis(recording: Recording, numbers: Breakdown, bottom: float) -> Iterator[str]:
    """Draw marks of time and of steps down to the bottom of the lanes, in groups."""
    moments = round_steps(numbers.seconds)
    size, unit = next((pair for pair in UNITS_OF_TIME if moments[-1] >= pair[0]), UNITS_OF_TIME[-1])
    for moment in moments:
        words = f"{moment / size:g} {unit}" if moment else "0"
        mark = line([(0, _LANES_TOP - 6), (0, bottom)], "grid")
        label = text(0, bottom + 16, words, 11, "muted", "middle")
        yield _moved(_x(moment, numbers), mark, label)
    for number, (begin, end) in enumerate(recording.steps if numbers.steps > 1 else [], 1):
        x = _x(begin - numbers.begin, numbers)
        words = f"step {number}" if _x(end - numbers.begin, numbers) - x >= _STEP_ROOM else ""
        mark = line([(0, _LANES_TOP - 22), (0, bottom)], "edge")
        yield _moved(x, mark, text(6, _LANES_TOP - 12, words, 11, "muted"))


def _bar(span: Span, top: float, numbers: Breakdown) -> str:
    """Draw a piece of work, with a tooltip for a browser."""
    span = span._replace(begin=span.begin - numbers.begin, end=span.end - numbers.begin)
    begin, end = max(0.0, span.begin), min(numbers.seconds, span.end)
    x = _x(begin, numbers)
    width = _x(end, numbers) - x
    name = f"waits for {span.name}" if span.kind is Kind.STALL else span.name
    label = name
    while text_width(label, _LABEL) + 4 > width and label:  # "model.layers.12", "layers.12", "12"
        label = label.partition(".")[2]
    drawn = max(width - min(0.6, 0.1 * width), 0.4)  # a gap to the next one, and never invisible
    bar = box(x, top + 5, drawn, _LANE_HEIGHT - 10, _color_of(span.kind), 2)
    letters = "on-pale" if span.kind in _PALE else "on-color"
    tip = f"<title>{escape(_tip(span, name))}</title>"
    words = _centered(x + width / 2, top + _LANE_HEIGHT / 2, label, letters)
    return f"<g>{tip}{bar}{words}</g>"


def _tip(span: Span, name: str) -> str:
    what = name if span.kind is Kind.STALL else f"{_WORDS[span.kind]}: {name}"
    seconds = span.end - span.begin
    begin, end = readable_seconds(span.begin), readable_seconds(span.end)
    words = f"{what}\n{readable_seconds(seconds)}, from {begin} to {end}"
    if span.nbytes and seconds:
        rate = readable_bytes(round(span.nbytes / seconds))
        words += f"\n{readable_bytes(span.nbytes)} at {rate}/s"
    return words


def _legend_rows(kinds: Set[Kind]) -> Iterator[list[Kind]]:
    """Yield the kinds of work that are shown, as many in a row as there is room for."""
    row: list[Kind] = []
    width = 0.0
    for kind in (kind for kind in _WORDS if kind in kinds):
        if row and width + _legend_width(kind) > PLOT_RIGHT - PLOT_LEFT:
            yield row
            row = []
            width = 0.0
        row.append(kind)
        width += _legend_width(kind)
    yield row


def _legend(row: Sequence[Kind], y: float) -> Iterator[str]:
    x = float(PLOT_LEFT)
    for kind in row:
        yield box(x, y - 10, 12, 12, _color_of(kind), 3)
        yield text(x + 18, y, _WORDS[kind], 12)
        x += _legend_width(kind)


def _legend_width(kind: Kind) -> float:
    return 18 + text_width(_WORDS[kind], 12) + 18


def _color_of(kind: Kind) -> str:
    """Return the name of a kind's color, which is a name in CSS, too."""
    return str(kind.value).replace(" ", "-")


def _x(moment: float, numbers: Breakdown) -> float:
    """Return where a moment, in seconds since the first step began, lies."""
    return PLOT_LEFT + (PLOT_RIGHT - PLOT_LEFT) * numbers.share(moment)


def _centered(x: float, y: float, words: str, color: str) -> str:
    return text(x, y + 0.36 * _LABEL, words, _LABEL, color, "middle")


def _moved(x: float, *shapes: str) -> str:
    return f'<g transform="translate({x:.2f} 0)">{"".join(shapes)}</g>'


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


def _style() -> str:
    """Return CSS for light and dark pages: a variable, a class of fills and one of strokes for each color."""
    on_light = "".join(_color(name, light) for name, (light, _) in COLORS.items())
    on_dark = "".join(_color(name, dark) for name, (_, dark) in COLORS.items())
    on_dark = f"@media(prefers-color-scheme:dark){{{on_dark}}}"
    return f":root{{color-scheme:light dark}}text{{font-family:{_FONT}}}{on_light}{on_dark}"


def _color(name: str, shade: str) -> str:
    # Not `fill:var(...)`, which many programs besides browsers do not know.
    return f":root{{--{name}:{shade}}}.f-{name}{{fill:{shade}}}.s-{name}{{stroke:{shade}}}"


def picture(width: float, height: float, shapes: Iterable[str]) -> str:
    """Put shapes, later ones on top, into an SVG element that has its colors, also for a page around it."""
    page = f'<style>{_style()}</style><rect width="100%" height="100%" class="f-page"/>'
    size = f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{page}' + "\n".join(shapes) + "</svg>\n"


def round_steps(span: float, count: int = 10) -> list[float]:
    """Return marks from zero to `span`, about `count` of them, at steps of one, two or five times a power of ten."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    return [index * step for index in range(int(span / step * (1 + 1e-9)) + 1)]


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
