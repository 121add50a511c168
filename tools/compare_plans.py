"""Compare what the planner chooses now with what it chose in an earlier revision, on virtual clocks.

    python tools/compare_plans.py                      # the last one that searched: b5f31e87
    python tools/compare_plans.py --revision HEAD~3

Each revision trains the same 56 cases once, with its own planner and engine: seven machines, each with two budgets,
moments in fp32 and in int8, clipped by norm or not. Nothing waits for real: the engine runs, and clocks say how long
everything takes (tests/simulated.py). What is printed is the time of a step that was trained by the plan, and what the
plan expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EARLIER = "b5f31e87"
ROOM = (26, 60)  # units of which the weights alone would fill a budget
PIECE = 1024  # numbers of a piece of a visit
STEPS = 7


def train_all() -> dict[str, tuple[float, float]]:
    """Train all cases with the package in the current folder: seconds of the last step, and those that were planned."""
    from sp_lightning.pipeline.optimizer import visit
    from sp_lightning.planning import memory
    from tests.planning import test_visits as visits

    visit.PIECE = memory.PIECE = PIECE  # type: ignore[attr-defined]
    found = {}
    for name, moments, clips, room in product(visits.MACHINES, visits.PER_NUMBER, (False, True), ROOM):
        budget = room * 2 * visits.NUMBERS + 24 * PIECE
        case = f"{name}, {moments}, {'clipped' if clips else 'not clipped'}, {room}"
        found[case] = train(visits.MACHINES[name], moments, clips, budget)
    return found


def train(machine: Any, moments: str, clips: bool, budget: int) -> tuple[float, float]:
    """Train blocks in bf16 with our AdamW on a machine of tests/planning/test_visits.py."""
    import torch

    from sp_lightning.optim import AdamW
    from sp_lightning.pipeline import Pipeline, PipelineOptions
    from sp_lightning.planning import AutoPlanner
    from tests.planning.test_visits import PER_NUMBER, UNITS
    from tests.simulated import WIDTH, SimulatedBackend, TimedBlock
    from tests.zoo.blocks import Chain

    handed_over = 6  # bytes for each number that a step is said to move: all but state
    on_host = PER_NUMBER[moments][0]
    rates = machine.up, machine.down, handed_over * machine.host / on_host, machine.device, machine.both, machine.memory
    backend = SimulatedBackend(*rates, on_host / handed_over)
    model = Chain(TimedBlock(WIDTH, backend, machine.forward, machine.backward) for _ in range(UNITS)).bfloat16()
    options = PipelineOptions(units=[TimedBlock], activations="keep", memory_budget=budget)
    pipeline = Pipeline(model, "cpu", options=options, backend=backend, planner=AutoPlanner())
    optimizers = pipeline.optimizers
    optimizer = AdamW(model.parameters(), moments=moments)
    seconds = 0.0
    for _ in range(STEPS):
        begin = backend.now
        loss = model(torch.ones(1, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum()
        with optimizers.clipping.measuring_norms() if clips else optimizers.stepping_in_backward(optimizer):
            loss.backward()
        if clips:
            optimizers.clipping.clip_grad_norm(model.parameters(), 1e9)
            # steps wait for the norm, which is on the device when backward has ended
            backend.main = backend.now
        optimizer.step()
        optimizer.zero_grad()
        seconds = backend.now - begin
    plan = pipeline.summary().plan
    assert plan is not None
    pipeline.detach()
    return seconds, plan.step_seconds


def train_in(folder: Path) -> dict[str, tuple[float, float]]:
    """Train all cases with the package that lies in a folder."""
    command = [sys.executable, str(Path(__file__).resolve()), "--train"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)  # noqa: S603
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return found


def train_earlier(revision: str) -> dict[str, tuple[float, float]]:
    """Train all cases with the package of a revision, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.tar"
        git = shutil.which("git") or "git"
        command = [git, "archive", "--output", str(archive), revision]
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603
        shutil.unpack_archive(archive, folder)
        return train_in(Path(folder))


def main() -> None:
    """Print each case, and how much longer steps take now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", default=EARLIER, help="the earlier revision of the package")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train_all()))
        return
    before, now = train_earlier(arguments.revision), train_in(ROOT)
    print(f"{'case':<52}{arguments.revision:>10}{'now':>10}{'longer':>9}{'planned':>10}{'off by':>9}")
    longer, off = [], []
    for case, (seconds, planned) in now.items():
        longer.append(seconds / before[case][0] - 1)
        off.append(planned / seconds - 1)
        print(f"{case:<52}{before[case][0]:>10.4g}{seconds:>10.4g}{longer[-1]:>+9.1%}{planned:>10.4g}{off[-1]:>+9.1%}")
    print(f"\n{len(longer)} cases, longer by {statistics.mean(longer):+.1%} in the mean, {max(longer):+.1%} at worst")
    print(f"plans are off by {max(map(abs, off)):.1%} at most; those before, by", end=" ")
    print(f"{max(abs(planned / seconds - 1) for seconds, planned in before.values()):.1%}")


if __name__ == "__main__":
    main()
