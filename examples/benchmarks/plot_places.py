"""Draw the three places of a unit, for the start page: on the host, on a visit, and living on the device.

python examples/benchmarks/plot_places.py docs/images/places.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from suite.picture import box, line, picture, text

# letters that can be read where a phone shows the picture 360 points wide
WIDTH, HEIGHT, SIZE = 600, 390, 17
DEVICE, HOST, TALL = 58, 226, 112  # where two rows of boxes begin, and how tall they are
PLACES = {  # what is on the device, on the host, and what travels
    "on the host": (
        ["weights,", "for a moment"],
        ["weights, gradients,", "state: the host", "steps"],
        ["weights up,", "gradients down"],
    ),
    "visits": (
        ["weights, gradients:", "the device steps"],
        ["weights, state"],
        ["weights, state up,", "both down"],
    ),
    "lives there": (["weights, gradients,", "state: the device", "steps"], [], ["nothing travels"]),
}


def shapes() -> Iterator[str]:
    """Yield a column for each place."""
    yield text(20, 30, "Three places of a unit", 22, bold=True)
    for number, (place, (above, below, travels)) in enumerate(PLACES.items()):
        left = 14 + 195 * number
        middle = left + 91
        for top, title, words in ((DEVICE, "device", above), (HOST, "host", below)):
            color = "load" if words else "lane"
            yield box(left, top, 183, TALL, color, radius=8)
            yield text(left + 10, top + 22, title, SIZE, "on-color" if words else "muted", bold=True)
            for row, word in enumerate(words):
                yield text(left + 10, top + 48 + 23 * row, word, SIZE, "on-color")
        for row, word in enumerate(travels):
            yield text(middle, DEVICE + TALL + 22 + 22 * row, word, SIZE, "muted", "middle")
        yield text(middle, HOST + TALL + 30, place, SIZE, anchor="middle", bold=True)
    yield line([(14, HEIGHT - 1), (WIDTH - 14, HEIGHT - 1)], "grid")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(WIDTH, HEIGHT, list(shapes())), encoding="utf-8")
