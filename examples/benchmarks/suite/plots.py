"""Plots of a result, as SVG: bars for each workload; memory and time over k; time over memory.

They are made only from the JSON file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plot_memory
from plot_k import COLORS, plot

from sp_lightning.pipeline import readable_bytes
from sp_lightning.planning.report import readable_seconds
from suite.picture import box, line, picture, text, text_width
from suite.results import Entry, entries

WIDTH, ROW, TOP = 1120, 30, 108
NAMES = 250  # x of the first panel, after the names
_PANELS = ((250, 520), (560, 810), (850, 1100))
_CUT = 120  # characters of an error that are shown


@dataclass(frozen=True)
class Quantity:
    """The quantity that a panel of bars shows.

    Attributes:
        title: Heading of the panel.
        value_of: Returns the value of an entry; None if it was not measured.
        words: Formats a value.
        color: Color of the bars.
        limit_of: Returns the best possible value, which a line marks; None if there is no limit.
    """

    title: str
    value_of: Callable[[Entry], float | None]
    words: Callable[[float], str]
    color: str
    limit_of: Callable[[Entry], float | None] = lambda _: None


_QUANTITIES = (
    Quantity(
        "time of a step",
        lambda entry: entry.seconds,
        readable_seconds,
        "backward",
        lambda entry: None if entry.limit is None else entry.limit["seconds"],
    ),
    Quantity("device memory", lambda entry: entry.device_bytes, lambda value: readable_bytes(int(value)), "load"),
    Quantity("host memory", lambda entry: entry.host_bytes, lambda value: readable_bytes(int(value)), "gradients"),
)


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all plots.

    Args:
        result: A result of `bench.py run`.
        folder: Folder to write to; created if it does not exist.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = result["machine"]["gpu"] or "CPU, emulated device"
    written = []
    for name, of_workload in entries(result).items():
        pictures = {name: bars(name, machine, of_workload)}
        sweep = windows(name, machine, of_workload)
        if sweep is not None:
            pictures[f"{name}-k"] = sweep
        if any(entry.budget is not None and entry.ok for entry in of_workload):
            pictures[f"{name}-over-memory"] = plot_memory.plot(result, name, plot_memory.measured(of_workload))
        for stem, drawn in pictures.items():
            path = folder / f"{stem}.svg"
            path.write_text(drawn, encoding="utf-8")
            written.append(path)
    return written


def bars(name: str, machine: str, of_workload: Sequence[Entry]) -> str:
    """Draw a row for each system and a panel for each quantity; a failed system shows its error instead of bars."""
    shapes = [text(28, 40, name, 22, bold=True), text(28, 64, machine, 13, "muted")]
    for number, entry in enumerate(of_workload):
        middle = TOP + ROW * number + ROW / 2 + 4
        shapes.append(text(28, middle, _fitting(f"{entry.title} (x {entry.samples})", NAMES - 40), 12))
        if not entry.ok:
            shapes.append(text(NAMES, middle, "; ".join(entry.errors)[:_CUT], 12, "stall"))
    for sides, quantity in zip(_PANELS, _QUANTITIES, strict=True):
        shapes += _bars(sides, quantity, of_workload)
    return picture(WIDTH, TOP + ROW * len(of_workload) + 24, shapes)


def _bars(sides: tuple[float, float], quantity: Quantity, of_workload: Sequence[Entry]) -> Iterator[str]:
    left, right = sides
    values = [quantity.value_of(entry) if entry.ok else None for entry in of_workload]
    highest = max((value for value in values if value), default=0.0)
    if not highest:
        return  # a CPU has no device memory to count
    yield text(left, TOP - 14, quantity.title, 14, bold=True)
    longest = right - left - 80  # the number follows its bar
    for number, (entry, value) in enumerate(zip(of_workload, values, strict=True)):
        if value is None:
            continue
        y, width = TOP + ROW * number + 5, longest * value / highest
        yield box(left, y, max(width, 1), ROW - 10, quantity.color, radius=2)
        yield text(left + width + 6, y + 14, quantity.words(value), 12, "muted")
        limit = quantity.limit_of(entry)
        if limit is not None:
            x = left + longest * limit / highest
            yield line([(x, y - 3), (x, y + ROW - 7)], "stall", 2)


def windows(name: str, machine: str, of_workload: Sequence[Entry]) -> str | None:
    """Plot device memory and step time over k, a line for each system and choice of k_prime; None if there are none."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in of_workload:
        device_bytes = entry.device_bytes or entry.counted_device_bytes if entry.ok else None
        if entry.window is None or device_bytes is None:
            continue
        k, k_prime = entry.window
        title = entry.title.partition(",")[0] + (", k'=1" if k_prime == 1 else ", k'=k/2")
        point = {"k": k, "k_prime": k_prime, "step_seconds": entry.seconds, "device_bytes": device_bytes}
        lines.setdefault(title, []).append(point)
    runs = [{"title": title, "device": f"{name}, {machine}", "points": points} for title, points in lines.items()]
    return plot(runs[: len(COLORS)]) if runs else None


def _fitting(words: str, width: float) -> str:
    while text_width(words, 12) > width:
        words = words[:-2].rstrip(".") + "."
    return words
