"""Plot device memory and step time over k from measured runs.

    python examples/benchmarks/plot_k.py k.json --output k.svg
    python examples/benchmarks/plot_k.py keep.json recompute.json -o k.svg  # several runs in one picture

The files are written by `sweep_k.py`: a title, a device, and points with `k`, `step_seconds` and `device_bytes`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.picture import box, line, picture, round_steps, text, text_width

from sp_lightning.planning.report import readable_seconds

WIDTH, HEIGHT = 1120, 460
TOP, BOTTOM = 118, 376
PANELS = ((84, 532), (652, 1100))
COLORS = ("backward", "stall", "load", "step", "gradients")


@dataclass(frozen=True)
class Quantity:
    """The quantity that a panel shows."""

    title: str
    value_of: Callable[[dict[str, Any]], float]
    words: Callable[[float], str]


def plot(runs: Sequence[dict[str, Any]]) -> str:
    """Draw two panels side by side as SVG, with one line for each run.

    Args:
        runs: Results of `sweep_k.py`.

    Raises:
        ValueError: If a run has no points.
    """
    for run in runs:
        if not run.get("points"):
            raise ValueError(f"The run {run.get('title', '')!r} has no points: was it written by sweep_k.py?")
    shapes = [text(28, 40, "What k costs", 22, bold=True), text(28, 64, runs[0]["device"], 13, "muted")]
    most = max(point["device_bytes"] for run in runs for point in run["points"])
    size, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    memory = Quantity("device memory", lambda point: point["device_bytes"] / size, lambda value: f"{value:.3g} {unit}")
    step_time = Quantity("time of a step", lambda point: point["step_seconds"], readable_seconds)
    for sides, quantity in zip(PANELS, (memory, step_time), strict=True):
        shapes += _panel(sides, runs, quantity)
    x = 28.0
    for run, color in zip(runs, COLORS, strict=False):
        shapes += [_dot(x + 5, HEIGHT - 22, color), text(x + 16, HEIGHT - 18, run["title"], 12)]
        x += 16 + text_width(run["title"], 12) + 28
    return picture(WIDTH, HEIGHT, shapes)


def _panel(sides: tuple[float, float], runs: Sequence[dict[str, Any]], quantity: Quantity) -> Iterator[str]:
    (left, right), value_of, words = sides, quantity.value_of, quantity.words
    points = [point for run in runs for point in run["points"]]
    ks = sorted({point["k"] for point in points})
    highest = 1.12 * max(map(value_of, points))

    def x_of(k: int) -> float:  # measured ks are evenly spaced, because most are powers of two
        return (left + right) / 2 if len(ks) == 1 else left + 24 + (right - left - 48) * ks.index(k) / (len(ks) - 1)

    def y_of(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / highest

    yield text(left, TOP - 16, quantity.title, 14, bold=True)
    for value in round_steps(highest, 5):
        yield line([(left, y_of(value)), (right, y_of(value))], "grid")
        yield text(left - 8, y_of(value) + 4, words(value) if value else "0", 11, "muted", "end")
    for k in ks:
        yield text(x_of(k), BOTTOM + 18, str(k), 12, "muted", "middle")
    yield text(right, BOTTOM + 38, "k: units on the device", 12, "muted", "end")
    for run, color in zip(runs, COLORS, strict=False):
        values = [(x_of(p["k"]), y_of(value_of(p)), value_of(p)) for p in sorted(run["points"], key=lambda p: p["k"])]
        yield line([(x, y) for x, y, _ in values], color, 2.5)
        for x, y, value in values:
            yield _dot(x, y, color)
            if len(runs) == 1:
                yield text(x, y - 11, words(value), 11, "text", "middle")


def _dot(x: float, y: float, color: str) -> str:
    return box(x - 5, y - 5, 10, 10, color, radius=5)


def main() -> None:
    """Read the results, draw them, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files written by sweep_k.py")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write, an .svg")
    arguments = parser.parse_args()
    if arguments.output.suffix != ".svg":
        parser.error(f"--output {arguments.output} must end in .svg")
    for path in arguments.results:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    if len(arguments.results) > len(COLORS):
        parser.error(f"{len(arguments.results)} results are more than the {len(COLORS)} that one picture shows")
    drawn = plot([json.loads(path.read_text(encoding="utf-8")) for path in arguments.results])
    arguments.output.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
