"""Measure the engine's own cost: host work per unit and step, and the time of a step relative to plain Lightning.

    python tools/overhead.py            # both, on the CPU
    python tools/overhead.py --json out.json
    python tools/overhead.py --device cuda         # host work alone, beside a GPU

Host work is measured on units that compute next to nothing, minus the time of a plain loop over the same modules in the
same run, so what is left is the engine. The ratio is measured under Lightning, on blocks that compute for `--block-ms`,
with all units on the device (k >= N), where a step should cost what plain Lightning's costs. Both measurements take
turns and medians are compared, because timings on a shared machine drift.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy, superpipeline


def make_chain(blocks: int, width: int) -> nn.Sequential:
    """Make a chain of equal blocks, each with two layers and a norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
    )


def make_step(model: nn.Module, batch: Tensor) -> Callable[[], float]:
    """Return a training step that returns its own time in seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        start = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def take_turns(steps: list[Callable[[], float]], rounds: int, warm_up: int = 3) -> list[list[float]]:
    """Run the steps in turns, and return the seconds of each."""
    for _ in range(warm_up):
        for step in steps:
            step()
    return [list(times) for times in zip(*([step() for step in steps] for _ in range(rounds)), strict=True)]


def host_work_per_unit(blocks: int, rounds: int, k: int, device: str) -> float:
    """Return the microseconds per unit and step that the engine adds to modules that compute next to nothing."""
    plain = make_chain(blocks, width=8)
    streamed = copy.deepcopy(plain)
    plain.to(device)
    batch = torch.ones(1, 8, device=device)
    pipeline = superpipeline(streamed, device, k=k)
    units = pipeline.summary().units
    times = take_turns([make_step(plain, batch), make_step(streamed, batch)], rounds)
    pipeline.detach()
    return (statistics.median(times[1]) - statistics.median(times[0])) / units * 1e6


class Chain(L.LightningModule):
    """A chain of blocks under Lightning, with a clock around each batch."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.chain = make_chain(blocks, width)
        self.seconds: list[float] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return some loss."""
        return self.chain(batch).square().mean()

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        """Stop the clock: forward, backward and the optimizer's step are over."""
        self.seconds.append(time.perf_counter() - self.start)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def time_fit(strategy: str | SuperpipelineStrategy, blocks: int, width: int, rows: int, steps: int) -> list[float]:
    """Return the seconds of each training step of a fit, except the first two."""
    model = Chain(blocks, width)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=steps + 2, barebones=True)
    trainer.fit(model, DataLoader(torch.randn(rows * (steps + 2), width), batch_size=rows))
    return model.seconds[2:]


def step_ratio(blocks: int, rounds: int, block_ms: float) -> tuple[float, float]:
    """Return the time of a step with k >= N relative to plain Lightning, and the milliseconds a block computes for."""
    width, rows = 256, 256
    while (measured := 1e3 * statistics.median(time_fit("auto", 1, width, rows, steps=5))) < block_ms:
        rows = int(rows * max(1.2, 1.1 * block_ms / measured))
    ratios = []
    for _ in range(rounds):  # in turns, because timings on a shared machine drift
        plain = statistics.median(time_fit("auto", blocks, width, rows, steps=4))
        ours = statistics.median(time_fit(SuperpipelineStrategy(k=blocks), blocks, width, rows, steps=4))
        ratios.append(ours / plain)
    return statistics.median(ratios), measured


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks in the chain")
    parser.add_argument("--rounds", type=int, default=7, help="how often each kind is measured")
    parser.add_argument(
        "--block-ms", type=float, default=20.0, help="milliseconds that a block computes for in the ratio"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="a GPU measures host work alone")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    parser.add_argument("--json", help="file to write the results to")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    results: dict[str, object] = {
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": sys.version.split()[0],
    }
    for k in (2, arguments.blocks):
        microseconds = host_work_per_unit(arguments.blocks, 20 * arguments.rounds, k, arguments.device)
        results[f"microseconds_per_unit_k{k}"] = round(microseconds, 1)
        print(f"host work per unit and step, k={k:<3} {microseconds:8.1f} us")
    if arguments.device == "cpu":
        ratio, measured = step_ratio(arguments.blocks, arguments.rounds, arguments.block_ms)
        results |= {"ratio": round(ratio, 3), "block_ms": round(measured, 1)}
        print(f"step time over plain Lightning, k>=N {ratio:8.3f}    ({arguments.blocks} blocks of {measured:.0f} ms)")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
