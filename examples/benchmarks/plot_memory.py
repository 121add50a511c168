"""Plot step time over device memory: what systems reached within a ladder of budgets, and what is planned for ours.

    python examples/benchmarks/plot_memory.py results.json --output memory.svg         # as measured
    python examples/benchmarks/plot_memory.py results.json --plan --output memory.svg  # and as planned
    ... --point "plain Lightning, another run" 51.3 0.27                               # and one from elsewhere

The file is written by `bench.py run --set memory`; any other with a decoder does, too. `--plan` adds a line that nobody
has measured: steps as the search of `sp-lightning plan` expects them, on a machine with the rates in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE.parent), str(HERE.parents[1])]  # contain the suite, the examples, the package
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from suite.picture import box, line, picture, round_steps, text, text_width  # noqa: E402
from suite.results import Entry, entries  # noqa: E402
from suite.sets import GIB, WORKLOADS  # noqa: E402

from sp_lightning.planning.assumptions import Assumptions  # noqa: E402
from sp_lightning.planning.choose import TooLittleMemory, choose  # noqa: E402
from sp_lightning.planning.estimate import assumed_machine, divide, estimate_work  # noqa: E402
from sp_lightning.planning.report import readable_seconds  # noqa: E402

# letters that can be read where a phone shows the picture 360 points wide
WIDTH, LEGEND_LINE = 600, 26
LEFT, RIGHT, TOP, BOTTOM = 76, 576, 128, 420
SIZE = 17
COLORS = (
    "backward", "stall", "load", "step", "gradients", "visit",
    "state-up", "state-down", "offload", "fetch", "add", "edge",
)  # fmt: skip
_FEW = 4  # curves whose first and last points have their seconds beside them
_BUDGETS = (5, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128)  # GiB that are planned with
_BYTES_STEPPED = 26  # that AdamW reads and writes on the host for a parameter
# of the rate of one large matrix product, what plain training of 1.5B reached on an H200 (docs/performance.md)
_REACHED = 0.4

Anchor: TypeAlias = Literal["start", "middle", "end"]


@dataclass
class Curve:
    """One system's steps.

    Attributes:
        title: The system, for the legend.
        is_planned: Whether nobody has measured it.
        points: Device memory in GiB, and seconds of a step.
    """

    title: str
    is_planned: bool = False
    points: list[tuple[float, float]] = field(default_factory=list)


def measured(of_workload: Sequence[Entry]) -> list[Curve]:
    """Return a curve for each system whose device memory was counted; systems without budgets have one point.

    Args:
        of_workload: All entries of a workload.
    """
    curves: dict[str, Curve] = {}
    for entry in of_workload:
        nbytes = entry.device_bytes or entry.counted_device_bytes if entry.ok else None
        if nbytes is not None and entry.window is None:
            title = entry.title.partition(", in ")[0].replace("_", ", ")
            curves.setdefault(entry.system, Curve(title)).points.append((nbytes / GIB, entry.seconds))
    return list(curves.values())


def planned(name: str, rooflines: Mapping[str, Any]) -> Curve:
    """Return what the planner expects of a workload, without measuring anything.

    The bench's networks compute their loss in slices (`chunked_cross_entropy`).

    Args:
        name: Name of the workload, which is one of a decoder.
        rooflines: The rates of the machine.
    """
    workload = WORKLOADS[name]
    given = Assumptions(
        link=rooflines["to_device_bytes_per_second"] / 1e9,
        compute=_REACHED * rooflines["matmul_flops"]["bfloat16"] / 1e12,
        host_bandwidth=_BYTES_STEPPED * rooflines["adamw_parameters_per_second"]["float32"] / 1e9,
        precision=workload.precision,  # type: ignore[arg-type]
        gradient_clip_val=workload.clipping,
        tokens=workload.samples * workload.items_per_sample,
        length=1,  # what attention takes is in what was reached
    )
    with torch.device("meta"):
        work, machine = estimate_work(divide(workload.network(), given), given), assumed_machine(given)
    curve = Curve("superpipeline, planned and not measured", is_planned=True)
    for budget in _BUDGETS:
        try:
            step = choose(work, machine, budget * GIB)
        except TooLittleMemory:
            continue
        point = step.device_bytes / GIB, step.seconds
        if point in curve.points:  # more memory makes no difference
            break
        curve.points.append(point)
    return curve


def plot(result: Mapping[str, Any], name: str, curves: Sequence[Curve]) -> str:
    """Draw seconds over GiB as SVG, with a line for each curve; what is planned has rings instead of dots.

    Args:
        result: A result of `bench.py run`.
        name: Name of the workload.
        curves: What to draw.

    Raises:
        ValueError: If there are no points.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("There is nothing to draw: device memory was not counted, or nothing ran.")
    widest, slowest = (1.06 * max(values) for values in zip(*points, strict=True))

    def place(gigabytes: float, seconds: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * gigabytes / widest, BOTTOM - (BOTTOM - TOP) * seconds / slowest

    is_planned = any(curve.is_planned for curve in curves)
    shapes = list(_head(result, name, is_planned))
    for value in round_steps(slowest, 5):
        _, y = place(0, value)
        shapes += [line([(LEFT, y), (RIGHT, y)], "grid"), _mark(LEFT - 8, y + 5, readable_seconds(value), "end")]
    for value in round_steps(widest, 6):
        x, _ = place(value, 0)
        shapes.append(_mark(x, BOTTOM + 22, f"{value:.4g}", "middle"))
    shapes.append(_mark((LEFT + RIGHT) / 2, BOTTOM + 44, "GPU memory, GiB", "middle"))
    ordered = [replace(curve, points=sorted(curve.points)) for curve in curves]
    for curve, color in zip(ordered, COLORS, strict=False):
        shapes.append(line([place(*point) for point in curve.points], color, 2.5))
        for point in curve.points:
            x, y = place(*point)
            shapes += _dot(x, y, color, curve.is_planned)
            if len(curve.points) == 1:
                shapes.append(_name(x, y, f"{curve.title}: {readable_seconds(point[1])}"))
            elif len(curves) <= _FEW and point in (curve.points[0], curve.points[-1]):
                anchor: Anchor = "end" if x > RIGHT - 40 else "middle"
                shapes.append(text(x, y - 12, readable_seconds(point[1]), SIZE, "text", anchor))
    rows = list(_legend(ordered))
    return picture(WIDTH, BOTTOM + 58 + LEGEND_LINE * len(rows), [*shapes, *(shape for row in rows for shape in row)])


def _head(result: Mapping[str, Any], name: str, is_planned: bool) -> Iterator[str]:
    """Say what is trained, on which machine, and what was measured of it."""
    description = result["workloads"][name]
    items = f"{description['samples'] * description['items_per_sample']:,} {description['items']}"
    clipping = "" if description["clipping"] is None else ", clipping by norm"
    began = result["began"][:10]
    yield text(20, 36, "Time of a step over GPU memory", 22, bold=True)
    yield text(20, 64, f"{name}, {items} a step{clipping}", SIZE, "muted")
    yield text(20, 88, f"{result['machine']['gpu'] or 'CPU, emulated device'}, measured on {began}", SIZE, "muted")
    if is_planned:
        yield text(20, 112, "rings: planned with the rates of that day, not measured", SIZE, "muted")


def _name(x: float, y: float, name: str) -> str:
    """Write a name beside its point, or below it and to the left if there is no room."""
    if x + 12 + text_width(name, SIZE) <= WIDTH:
        return text(x + 12, y + 6, name, SIZE)
    return text(x + 5, y + 28, name, SIZE, "text", "end")


def _legend(curves: Sequence[Curve]) -> Iterator[list[str]]:
    """Yield rows of names, as many in a row as there is room for; a single point has its name beside it."""
    x, y = 20.0, BOTTOM + 76.0
    row: list[str] = []
    for curve, color in zip(curves, COLORS, strict=False):
        if len(curve.points) == 1:
            continue
        width = 16 + text_width(curve.title, SIZE) + 20
        if row and x + width > WIDTH:
            yield row
            x, y, row = 20.0, y + LEGEND_LINE, []
        row += [*_dot(x + 5, y - 6, color, curve.is_planned), text(x + 16, y, curve.title, SIZE)]
        x += width
    if row:
        yield row


def _mark(x: float, y: float, words: str, anchor: Anchor) -> str:
    return text(x, y, words, SIZE, "muted", anchor)


def _dot(x: float, y: float, color: str, is_ring: bool) -> list[str]:
    shapes = [box(x - 5, y - 5, 10, 10, color, radius=5)]
    if is_ring:
        shapes.append(box(x - 2.5, y - 2.5, 5, 5, "page", radius=2.5))
    return shapes


def main() -> None:
    """Read the results, draw them, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="file written by bench.py run")
    parser.add_argument("--workload", metavar="NAME", help="by default the first in the file")
    parser.add_argument("--plan", action="store_true", help="draw what is planned, too")
    parser.add_argument("--point", nargs=3, action="append", default=[], metavar=("TITLE", "GIB", "SECONDS"))
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write, an .svg")
    options = parser.parse_args()
    if options.output.suffix != ".svg":
        parser.error(f"--output {options.output} must end in .svg")
    if not options.result.is_file():
        parser.error(f"{options.result} is not a file")
    result = json.loads(options.result.read_text(encoding="utf-8"))
    found = entries(result)
    name = options.workload or next(iter(found), "")
    if name not in found:
        parser.error(f"--workload {name!r} is not in {options.result}, which has {', '.join(found) or 'none'}")
    curves = measured(found[name])
    if options.plan:
        curves.insert(0, planned(name, result["rooflines"]))
    curves += [Curve(title, points=[(float(gib), float(seconds))]) for title, gib, seconds in options.point]
    options.output.write_text(plot(result, name, curves), encoding="utf-8")


if __name__ == "__main__":
    main()
