"""Benchmark the optimizer's step on the host: one unit at a time in a single pass, against torch's own step.

    python tools/host_step.py
    python tools/host_step.py --parameters 50e6 --tensors 50 5000 --threads 1 2 --json out.json

As on a CPU with AVX2 alone, numba's kernels with `NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=` (empty: the name alone
leaves it the AVX-512 of this machine), and torch's with `ATEN_CPU_CAPABILITY=avx2`.

There are three kinds of work: the update alone; the update after clipping by norm; and the work of mixed precision,
where a bf16 gradient is cast and clipped, and the new weight is copied to bf16 for the device. Plain training makes a
separate pass over memory for each of these. The variants take turns, in alternating order, and the median of each
counts, because others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.optim import AdamW
from sp_lightning.pipeline.optimizer.unit_steps import Work, update_weights

FACTOR = 0.5  # what clipping multiplies by; the time of a step does not depend on its value


def adjacent_tensors(tensors: int, elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors that are adjacent in memory, as those of a unit are."""
    return list(torch.randn(tensors, elements).to(dtype).unbind())


@dataclass
class Unit:
    """Weights with fp32 gradients, bf16 gradients as they arrive from the device, and bf16 copies."""

    masters: list[nn.Parameter]
    gradients: list[Tensor]
    arrived: list[Tensor]
    copies: list[Tensor]

    @classmethod
    def make(cls, tensors: int, elements: int) -> Unit:
        """Make a unit of random numbers."""
        masters = [nn.Parameter(memory) for memory in adjacent_tensors(tensors, elements)]
        gradients = adjacent_tensors(tensors, elements)
        return cls(masters, gradients, *(adjacent_tensors(tensors, elements, torch.bfloat16) for _ in range(2)))


def plain_step(unit: Unit, work: str, **options: Any) -> Callable[[], None]:
    """Return torch's own step, with separate passes for the work before and after it."""
    optimizer = torch.optim.AdamW(unit.masters, lr=1e-4, **options)
    factor = torch.tensor(FACTOR)

    def step() -> None:
        with torch.no_grad():
            if work == "mixed":
                for gradient, arrived in zip(unit.gradients, unit.arrived, strict=True):
                    gradient.copy_(arrived)
            if work != "update":
                torch._foreach_mul_(unit.gradients, factor)  # as clip_grad_norm_ does
            for master, gradient in zip(unit.masters, unit.gradients, strict=True):
                master.grad = gradient
            optimizer.step()
            if work == "mixed":
                for copy, master in zip(unit.copies, unit.masters, strict=True):
                    copy.copy_(master)

    return step


def unit_step(unit: Unit, work: str, **options: Any) -> Callable[[], None]:
    """Return a step that does the same work unit by unit."""
    optimizer = torch.optim.AdamW(unit.masters, lr=1e-4, **options)
    gradients = unit.arrived if work == "mixed" else unit.gradients
    copies: Sequence[Tensor | None] = unit.copies if work == "mixed" else [None] * len(unit.masters)
    factors = () if work == "update" else (torch.tensor(FACTOR),)
    updates = [
        (Work(master.data, gradient, optimizer.state[master], copy), factors)
        for master, gradient, copy in zip(unit.masters, gradients, copies, strict=True)
    ]

    @torch.no_grad()
    def step() -> None:
        hyper = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        update_weights(optimizer, hyper, updates)

    return step


VARIANTS: dict[str, Callable[[Unit, str], Callable[[], None]]] = {
    "default": lambda unit, work: plain_step(unit, work),
    "fused": lambda unit, work: plain_step(unit, work, fused=True),
    "by unit": lambda unit, work: unit_step(unit, work),
    "by unit, fused": lambda unit, work: unit_step(unit, work, fused=True),
}


def times_of(steps: dict[str, Callable[[], None]], rounds: int, of_all: Callable[..., float]) -> dict[str, float]:
    """Return milliseconds of each step, of `rounds` rounds, every other one in the opposite order."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            steps[name]()
            if turn >= 2:  # the first steps create the state
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: of_all(each) for name, each in times.items()}


def measure(tensors: int, elements: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure every variant of every kind of work, and print a row for each kind."""
    torch.set_num_threads(threads)
    unit = Unit.make(tensors, elements)
    rows = []
    for work in ("update", "clip", "mixed"):
        times = times_of({name: variant(unit, work) for name, variant in VARIANTS.items()}, rounds, statistics.median)
        ratios = {
            "default / by unit": times["default"] / times["by unit"],
            "default / by unit, fused": times["default"] / times["by unit, fused"],
            "fused / by unit, fused": times["fused"] / times["by unit, fused"],
        }
        rows.append({"threads": threads, "tensors": tensors, "elements": elements, "work": work, "ms": times, **ratios})
        print(
            f"{threads:>7} {tensors:>7}  {work:<7}"
            + "".join(f"{milliseconds:>15.1f}" for milliseconds in times.values())
            + "".join(f"{ratio:>14.2f}" for ratio in ratios.values())
        )
    return rows


def compact_optimizer(unit: Unit, moments: str) -> AdamW:
    """Return one of `sp_lightning.optim` over bf16 weights with bf16 gradients."""
    weights = [nn.Parameter(copy) for copy in unit.copies]
    for weight, arrived in zip(weights, unit.arrived, strict=True):
        weight.grad = arrived
    return AdamW(weights, lr=1e-4, moments=moments)


def traffic(optimizer: AdamW) -> float:
    """Return the bytes for each parameter that a step reads and writes: weights and state both ways."""
    weights = optimizer.param_groups[0]["params"]
    state = sum(value.nbytes for weight in weights for value in optimizer.state[weight].values() if value.dim())
    return (2 * state + sum(2 * weight.nbytes + weight.grad.nbytes for weight in weights)) / sum(
        weight.numel() for weight in weights
    )


def measure_compact(tensors: int, elements: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure torch's cast, scale, fused update and cast against one pass over fewer bytes; print a row for each.

    Here the shortest time of each counts: it is the one that others on the machine have disturbed least.
    """
    torch.set_num_threads(threads)
    unit = Unit.make(tensors, elements)
    optimizers = {f"{moments} moments": compact_optimizer(unit, moments) for moments in ("fp32", "int8")}
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    times = times_of({"torch": plain_step(unit, "mixed", fused=True), **steps}, rounds, min)
    rows = []
    for name, milliseconds in times.items():
        ratio = times["torch"] / milliseconds
        moved = traffic(optimizers[name]) if name in optimizers else 48.0  # 2 + 4, 4 + 4, 16 + 12, 4 + 2
        print(f"{threads:>7} {tensors:>7}  {name:<14} {milliseconds:>8.1f} {ratio:>8.2f} {moved:>8.1f}")
        row = {"threads": threads, "tensors": tensors, "kind": name, "ms": milliseconds}
        rows.append({**row, "torch / kind": ratio, "bytes for each parameter": moved})
    return rows


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6, help="approximate number of elements in total")
    parser.add_argument(
        "--tensors", type=int, nargs="+", default=[50, 5000], help="number of tensors they are divided into"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads that torch computes with")
    parser.add_argument("--rounds", type=int, default=20, help="how often each variant is measured")
    parser.add_argument("--json", help="file to write the results to")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    print("AdamW, milliseconds; ratios above 1 say how many times faster a unit's step is")
    print(
        "threads tensors  work   "
        + "".join(f"{name:>15}" for name in VARIANTS)
        + "".join(f"{name:>14}" for name in ("default/unit", "default/fused", "fused/fused"))
    )
    rows = []
    for threads in arguments.threads:
        for tensors in arguments.tensors:
            elements = max(1, round(arguments.parameters / tensors / 128)) * 128
            rows += measure(tensors, elements, threads, arguments.rounds)
    print("bf16 weights: shortest milliseconds, times as fast as torch, bytes moved each")
    compact = []
    for threads in arguments.threads:
        for tensors in arguments.tensors:
            elements = max(1, round(arguments.parameters / tensors / 128)) * 128
            compact += measure_compact(tensors, elements, threads, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            names = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ATEN_CPU_CAPABILITY")
            settings = {name: os.environ[name] for name in names if name in os.environ}
            versions = {"torch": torch.__version__, "settings": settings}
            json.dump({**versions, "rows": rows, "fewer bytes": compact}, file, indent=2)


if __name__ == "__main__":
    main()
