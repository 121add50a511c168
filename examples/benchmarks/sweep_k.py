"""Measure device memory and step time over k: how much time every unit that is not on the device costs.

    python examples/benchmarks/sweep_k.py --output k.json         # on the accelerator if there is one, else on the CPU
    python examples/benchmarks/plot_k.py k.json --output k.svg    # the plot

The model is a stack of transformer blocks without attention (a norm, two linear layers and a GELU), trained with AdamW.
Every k is measured in the same process, several times in turns, because timings on a shared machine drift; the median
is kept. Device memory is counted by torch's allocator, or on a CPU by the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sp_lightning import superpipeline


@dataclass
class Point:
    """The measurements for one k."""

    k: int
    k_prime: int
    step_seconds: float
    device_bytes: int


def make_model(blocks: int, width: int) -> nn.Sequential:
    """Make a stack of equal blocks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
    )


def measure(arguments: argparse.Namespace, k: int) -> Point:
    """Measure the median seconds of a step and the peak device memory of all steps."""
    model = make_model(arguments.blocks, arguments.width)
    k_prime = min(k, arguments.k_prime)
    pipeline = superpipeline(model, arguments.device, k=k, k_prime=k_prime, activations=arguments.activations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(arguments.rows, arguments.width, device=pipeline.device)
    counts_memory = pipeline.device.type == "cuda"
    seconds = []
    for step in range(arguments.warm_up + arguments.steps):
        if step == arguments.warm_up and counts_memory:
            torch.cuda.reset_peak_memory_stats(pipeline.device)
        begin = time.perf_counter()
        with pipeline.step():
            loss = model(batch).square().mean()
            with pipeline.optimizers.stepping_in_backward(optimizer):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if counts_memory:
            torch.cuda.synchronize(pipeline.device)
        seconds.append(time.perf_counter() - begin)
    plan = pipeline.summary()
    counted = plan.device_bytes + plan.gradient_bytes + pipeline.stats.activation_peak_bytes
    peak = torch.cuda.max_memory_allocated(pipeline.device) if counts_memory else counted
    pipeline.detach()
    return Point(k, k_prime, statistics.median(seconds[arguments.warm_up :]), peak)


def sweep(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure every k, in turns."""
    powers = [2**power for power in range(10) if 2**power < arguments.blocks]
    ks = arguments.k or [*powers, arguments.blocks]
    runs: dict[int, list[Point]] = {k: [] for k in ks}
    for _ in range(arguments.rounds):
        for k in ks:
            runs[k].append(measure(arguments, k))
    points = []
    for k, measured in runs.items():
        seconds = statistics.median(point.step_seconds for point in measured)
        peak = max(point.device_bytes for point in measured)
        points.append(Point(k, measured[0].k_prime, seconds, peak))
        print(f"k={k:<4} {1e3 * seconds:9.2f} ms a step {peak / 2**20:10.1f} MiB on the device")
    title = f"{arguments.blocks} blocks of width {arguments.width}, batch of {arguments.rows}, {arguments.activations}"
    device = device_name(arguments.device)
    return {"title": title, "device": device, "torch": torch.__version__, "points": [vars(point) for point in points]}


def device_name(device: str | None) -> str:
    """Return the name of the device that is measured."""
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU, emulated device"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks in the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of a block (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--k", type=int, nargs="+", help="values to measure (default: powers of two up to all blocks)")
    parser.add_argument("--k-prime", type=int, default=1, help="units moved together (default: %(default)s)")
    parser.add_argument("--activations", choices=["keep", "recompute", "offload"], default="keep")
    parser.add_argument("--device", help="where to compute (default: the accelerator, or the CPU)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a measurement (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each k (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    arguments.output.write_text(json.dumps(sweep(arguments), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
