"""Draws a recording: a headline, where the time went, and a row of work for each lane."""

from __future__ import annotations

from sp_lightning.pipeline import Kind, Lane, Recording, Span, readable_bytes, readable_seconds
from sp_lightning.timeline.breakdown import Breakdown, break_down
from sp_lightning.timeline.drawing import Box, Drawing, Line, Text, fits, label_size, text_width
from sp_lightning.timeline.scale import ticks

WIDTH = 1280
MARGIN = 28
PLOT_LEFT, PLOT_RIGHT = 250, WIDTH - MARGIN
_LANE_HEIGHT, _LANE_GAP = 58, 12
_STRIP_TOP, _STRIP_HEIGHT = 104, 30
_LANES_TOP = 196
_STEP_ROOM = 56  # width of the words "step 100"

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.STALL: "device waits",
    Kind.LOAD: "weights",
    Kind.FETCH: "activations, back",
    Kind.SUMS: "gradients, back",
    Kind.GRADIENTS: "gradients",
    Kind.OFFLOAD: "activations, out",
    Kind.STEP: "optimizer step",
    Kind.ADD: "gradients added up",
}
"""Names of the kinds of work in pictures."""

PALE = {Kind.FETCH, Kind.SUMS, Kind.OFFLOAD, Kind.ADD, Kind.GRADIENTS}
"""Kinds whose color needs dark letters."""

_LANE_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.TO_DEVICE: "host to device",
    Lane.TO_HOST: "device to host",
    Lane.HOST: "host",
}


def draw_timeline(recording: Recording, caption: str = "") -> Drawing:
    """Draw the steps of a recording.

    Args:
        recording: A finished recording of at least one step.
        caption: A description of what was recorded, shown in the picture.

    Raises:
        ValueError: If the recording has no step.
    """
    numbers = break_down(recording)
    drawing = Drawing(WIDTH, _LANES_TOP + len(Lane) * (_LANE_HEIGHT + _LANE_GAP) + 78)
    _draw_head(drawing, numbers, caption)
    _draw_strip(drawing, numbers)
    tops = {lane: _LANES_TOP + row * (_LANE_HEIGHT + _LANE_GAP) for row, lane in enumerate(Lane)}
    for lane, top in tops.items():
        _draw_lane(drawing, lane, top, numbers)
    _draw_axis(drawing, recording, numbers)
    for span in sorted(recording.spans, key=lambda span: (span.kind is Kind.STALL, span.begin, -span.end)):
        if span.end > numbers.begin and span.begin < numbers.end:
            drawing.add(_bar(span, tops[span.lane], numbers))
    _draw_legend(drawing, recording)
    return drawing


def headline(numbers: Breakdown) -> str:
    """Say in a sentence or two where the time went."""
    device = f"The device computes {numbers.share(numbers.busy[Lane.COMPUTE]):.0%} of the time"
    causes = sorted(numbers.stalls.items(), key=lambda item: -item[1])
    waits = [f"{numbers.share(seconds):.0%} for {cause}" for cause, seconds in causes if numbers.share(seconds) > 0.01]
    device += f", and waits {' and '.join(waits)}." if waits else ", and hardly ever waits for a copy."
    lane = numbers.bottleneck
    if lane is None:
        lost = f"{numbers.share(numbers.elsewhere):.0%}"
        return f"{device} In {lost} of the time no unit computes: loss, data, loop or optimizer."
    if lane is Lane.COMPUTE:
        return f"{device} Computing is the bottleneck."
    name = "work on the host" if lane is Lane.HOST else f"the way from {_LANE_WORDS[lane]}"
    return f"{device} The bottleneck is {name}, busy {numbers.share(numbers.busy[lane]):.0%} of the time."


def where_time_goes(numbers: Breakdown) -> list[tuple[str, str, float]]:
    """Return what the device did, as names, colors and seconds that add up to the total time."""
    parts = [(WORDS[kind], kind.value, numbers.kinds[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    parts += [(f"waits for {cause}", "stall", seconds) for cause, seconds in sorted(numbers.stalls.items())]
    return [part for part in [*parts, ("elsewhere", "elsewhere", numbers.elsewhere)] if part[2] > 0]


def _draw_head(drawing: Drawing, numbers: Breakdown, caption: str) -> None:
    each = readable_seconds(numbers.seconds / numbers.steps)
    title = f"{numbers.steps} steps of {each}" if numbers.steps > 1 else f"One step: {each}"
    drawing.add(
        Text(MARGIN, 44, title, 24, bold=True),
        Text(WIDTH - MARGIN, 44, caption, 13, "muted", "end"),
        Text(MARGIN, 74, headline(numbers), 15),
    )


def _draw_strip(drawing: Drawing, numbers: Breakdown) -> None:
    """Draw a strip with the shares of what the device did."""
    parts = where_time_goes(numbers)
    total = sum(seconds for _, _, seconds in parts)
    x = float(MARGIN)
    below = 0.0
    for name, color, seconds in parts:
        width = seconds / total * (WIDTH - 2 * MARGIN)
        words = f"{name} {numbers.share(seconds):.0%}"
        box = Box(x, _STRIP_TOP, width - 1.5, _STRIP_HEIGHT, color, 3, words, _label_color(color))
        drawing.add(box)
        if not fits(box, label_size(box)) and numbers.share(seconds) >= 0.01 and x >= below:
            middle = min(x + width / 2, WIDTH - MARGIN - text_width(words, 11) / 2)
            drawing.add(Text(middle, _STRIP_TOP + _STRIP_HEIGHT + 16, words, 11, "muted", "middle"))
            below = middle + text_width(words, 11)
        x += width


def _label_color(color: str) -> str:
    return "text" if color == "elsewhere" else "on color"


def _draw_axis(drawing: Drawing, recording: Recording, numbers: Breakdown) -> None:
    bottom = _LANES_TOP + len(Lane) * (_LANE_HEIGHT + _LANE_GAP)
    for moment, words in ticks(numbers.seconds):
        x = PLOT_LEFT + _per_second(numbers) * moment
        drawing.add(Line([(x, _LANES_TOP - 6), (x, bottom)], "grid", role="tick"))
        drawing.add(Text(x, bottom + 16, words, 11, "muted", "middle", role="tick"))
    for number, (begin, end) in enumerate(recording.steps, 1):
        words = f"step {number}" if _per_second(numbers) * (end - begin) >= _STEP_ROOM else ""
        x = PLOT_LEFT + _per_second(numbers) * (begin - numbers.begin)
        if len(recording.steps) > 1:
            drawing.add(Line([(x, _LANES_TOP - 22), (x, bottom)], "edge", role="step"))
            drawing.add(Text(x + 6, _LANES_TOP - 12, words, 11, "muted", role="step"))


def _draw_lane(drawing: Drawing, lane: Lane, top: float, numbers: Breakdown) -> None:
    """Draw a lane's name, how busy it was, and the background for its work."""
    busy = numbers.share(numbers.busy[lane])
    drawing.add(Text(MARGIN, top + 19, _LANE_WORDS[lane], 14, bold=True))
    color = "edge"
    if lane is numbers.bottleneck:
        color = "backward" if lane is Lane.COMPUTE else "stall"
        drawing.add(Text(PLOT_LEFT - 16, top + 19, "bottleneck", 11, color, "end", bold=True))
    if numbers.nbytes[lane] and lane is not Lane.HOST:
        moved = readable_bytes(round(numbers.nbytes[lane] / numbers.steps))
        rate = readable_bytes(round(numbers.rate(lane)))
        drawing.add(Text(MARGIN, top + 36, f"{moved} at {rate}/s", 11, "muted"))
    share = PLOT_LEFT - MARGIN - 60
    drawing.add(
        Box(MARGIN, top + _LANE_HEIGHT - 10, share, 5, "grid", 2.5),
        Box(MARGIN, top + _LANE_HEIGHT - 10, max(2, share * busy), 5, color, 2.5),
        Text(PLOT_LEFT - 16, top + _LANE_HEIGHT - 4, f"{busy:.0%}", 12, "text", "end", bold=True),
    )
    drawing.add(Box(PLOT_LEFT, top, PLOT_RIGHT - PLOT_LEFT, _LANE_HEIGHT, "lane", 4))


def _bar(span: Span, top: float, numbers: Breakdown) -> Box:
    begin, end = max(span.begin, numbers.begin) - numbers.begin, min(span.end, numbers.end) - numbers.begin
    x, width = PLOT_LEFT + _per_second(numbers) * begin, _per_second(numbers) * (end - begin)
    data = {"begin": f"{begin:.9f}", "end": f"{end:.9f}", "label": _words(span), "tip": tip(span)}
    color = "on pale" if span.kind in PALE else "on color"
    gap, radius = min(0.6, 0.1 * width), min(2.0, width / 6)
    place = (x, top + 5, max(width - gap, 0.4), _LANE_HEIGHT - 10)
    return Box(*place, span.kind.value, radius, _label(span, width), color, data)


def _label(span: Span, width: float) -> str:
    """Return a unit's name, or as much of its end as there is room for: "model.layers.12", "layers.12", "12"."""
    words = _words(span)
    while text_width(words, 12) + 4 > width and "." in words:
        words = words.partition(".")[2]
    return words


def _words(span: Span) -> str:
    return f"waits for {span.name}" if span.kind is Kind.STALL else span.name


def tip(span: Span) -> str:
    """Return the tooltip for a piece of work."""
    what = _words(span) if span.kind is Kind.STALL else f"{WORDS[span.kind]}: {span.name}"
    seconds = span.end - span.begin
    words = f"{what}\n{readable_seconds(seconds)}, from {readable_seconds(span.begin)} to {readable_seconds(span.end)}"
    if span.nbytes and seconds:
        words += f"\n{readable_bytes(span.nbytes)} at {readable_bytes(round(span.nbytes / seconds))}/s"
    return words


def _draw_legend(drawing: Drawing, recording: Recording) -> None:
    x, y = float(PLOT_LEFT), drawing.height - 24
    present = {span.kind for span in recording.spans}
    for kind in [kind for kind in Kind if kind in present]:
        drawing.add(Box(x, y - 10, 12, 12, kind.value, 3), Text(x + 18, y, WORDS[kind], 12))
        x += 18 + text_width(WORDS[kind], 12) + 18


def _per_second(numbers: Breakdown) -> float:
    """Return the drawing's units per second."""
    return (PLOT_RIGHT - PLOT_LEFT) / numbers.seconds if numbers.seconds else 0.0
