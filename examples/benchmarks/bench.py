"""Benchmark superpipeline against what users would choose instead, on the same workloads, in one run.

    python examples/benchmarks/bench.py list                                            # sets, workloads, systems
    python examples/benchmarks/bench.py run --set toy --time-limit 120 --output x.json  # runs on any laptop
    python examples/benchmarks/bench.py render x.json --plots FOLDER                    # tables and pictures from JSON

The README.md beside this file explains what is measured, and how to read the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE.parent), str(HERE.parents[1])]  # contain the suite, the examples, the package
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Names are checked before anything runs."""
    from recipe import file, positive
    from suite.sets import SETS, WORKLOADS
    from suite.systems import SYSTEMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list sets, workloads and systems")
    run = commands.add_parser(
        "run", help="measure, and write JSON", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    run.add_argument("--set", nargs="+", choices=SETS, default=[], dest="sets", metavar="SET", help="sets of workloads")
    run.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[], metavar="NAME", help="single workloads")
    run.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="systems")
    run.add_argument("--rounds", type=positive, default=2, help="how often everything is measured, in turns")
    run.add_argument("--warm-up", type=positive, default=5, help="warm-up steps of each process, which do not count")
    run.add_argument("--steps", type=positive, default=10, help="measured steps of each process")
    run.add_argument("--time-limit", type=float, default=540.0, help="seconds for the whole run")
    run.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="host memory that the machine provides once it is used, such as 120GB",
    )
    run.add_argument("--revision", metavar="COMMIT", help="the measured commit, if there is no git repository")
    run.add_argument("--output", type=Path, required=True, help="JSON file to write")
    render = commands.add_parser("render", help="print the results as tables")
    render.add_argument("result", type=file, help="JSON file")
    render.add_argument("--plots", type=Path, metavar="FOLDER", help="folder to write pictures to, as SVG")
    options = parser.parse_args(arguments)
    if options.command == "run" and not (options.sets or options.workloads):
        run.error("name a --set or --workloads")
    return options


def size(text: str) -> int:
    """Parse an amount of memory."""
    from sp_lightning.pipeline.options import parse_bytes

    try:
        return parse_bytes(text, device_bytes=None) or 0
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory such as '120GB'") from None


def list_all() -> None:
    """Print all sets with their workloads, and all systems."""
    from suite.sets import ABOUT, SETS
    from suite.systems import SYSTEMS

    for name, workloads in SETS.items():
        print(f"{name}: {ABOUT[name]}")
        for workload in workloads:
            print(f"    {workload.name}")
    print("systems:")
    for name, system in SYSTEMS.items():
        print(f"    {name:<16} {system.title}")


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark, and write the results."""
    from suite.runner import Settings
    from suite.runner import run as measure
    from suite.sets import SETS, WORKLOADS

    # Child processes have to find the same modules.
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    # superpipeline asks torch's allocator for that, and every system is to have it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    names = [workload.name for name in arguments.sets for workload in SETS[name]] + arguments.workloads
    settings = Settings(
        [WORKLOADS[name] for name in dict.fromkeys(names)],
        arguments.systems,
        arguments.rounds,
        arguments.warm_up,
        arguments.steps,
        arguments.time_limit,
        arguments.host_memory,
        arguments.revision,
    )
    measure(settings, arguments.output, lambda line: print(line, flush=True))


def render(arguments: argparse.Namespace) -> None:
    """Print the report, and draw the plots."""
    from suite.plots import write_plots
    from suite.report import report

    result = json.loads(Path(arguments.result).read_text(encoding="utf-8"))
    print(report(result))
    if arguments.plots is not None:
        for path in write_plots(result, arguments.plots):
            print(f"![{path.stem}]({path})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command given on the command line."""
    options = parse(arguments)
    {"list": lambda _: list_all(), "run": run, "render": render}[options.command](options)


if __name__ == "__main__":
    main()
