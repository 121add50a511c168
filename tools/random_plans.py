"""Ask of random models on random machines whether what is fixed by hand is planned to be faster than what is chosen.

    python tools/random_plans.py                      # 500 cases
    python tools/random_plans.py --cases 20 --seed 7

Each case is planned as it is, with each number of places, with each policy for activations, with all steps on the host,
and clipped where it was not. What is printed is by how much the fastest of these is planned to be faster: where it can
be, the search has missed something, or the clock contradicts itself.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from sp_lightning.planning.assumptions import Assumptions
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.estimate import assumed_machine, divide, estimate_work
from sp_lightning.planning.work import Prediction

VOCABULARY = 32000


class Decoder(nn.Module):
    """Blocks of two matrices between a table of words and a head, of one width; nothing is computed."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)))
        self.blocks.extend(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(layers - 1)
        )
        self.head = nn.Linear(width, VOCABULARY)


def random_case(seed: int) -> tuple[nn.Module, Assumptions]:
    """Return a model, and what is assumed for it; its device has room for a part of it."""
    draw = random.Random(seed)
    width, layers = draw.choice([1024, 2048, 4096]), draw.randint(6, 16)
    with torch.device("meta"):
        model = Decoder(width, layers)
    numbers = sum(weight.numel() for weight in model.parameters())
    host = draw.uniform(20, 300)
    given = Assumptions(
        device_memory=int(numbers * draw.uniform(1, 20)) + 2**30,
        host_memory=int(numbers * draw.uniform(8, 40)) + 2**33,
        link=draw.choice([6.0, 12.0, 25.0, 54.0]),
        compute=draw.uniform(20, 400),
        host_bandwidth=host,
        memory_bandwidth=host * draw.uniform(1.0, 2.5),
        precision=draw.choice(["bf16-mixed", "bf16-true"]),
        accumulate=draw.choice([1, 1, 1, 4]),
        tokens=2 ** draw.randint(9, 14),
        lora=draw.choice([None, None, None, 16]),
    )
    return model, replace(given, moments="int8") if draw.random() < 0.4 else given


def step(model: nn.Module, given: Assumptions, k: int | None = None) -> Prediction | None:
    """Return the fastest step; None if nothing fits."""
    workload, machine = estimate_work(divide(model, given), given), assumed_machine(given)
    try:
        return choose(workload, machine, given.device_bytes, host_budget=given.host_bytes, k=k or "auto")
    except TooLittleMemory:
        return None


def gains(model: nn.Module, given: Assumptions) -> Iterator[tuple[str, float]]:
    """Yield what is fixed, and by which part of it the automatic choice takes longer."""
    automatic = step(model, given)
    fixed = {f"k={k}": step(model, given, k) for k in (1, 2, 3, 4)}
    fixed |= {policy: step(model, replace(given, activations=policy)) for policy in ("keep", "recompute", "offload")}
    fixed["on the host"] = step(model, replace(given, optimizer_on="host"))
    fixed["clipped"] = step(model, replace(given, gradient_clip_val=1.0))
    for name, prediction in fixed.items():
        if prediction is not None:
            yield name, float("inf") if automatic is None else automatic.seconds / prediction.seconds - 1


def main() -> None:
    """Print the largest gain of each kind, and the cases where it is more than 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments = parser.parse_args()
    worst: dict[str, float] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        for name, gain in gains(*random_case(seed)):
            worst[name] = max(gain, worst.get(name, gain))
            if gain > 0.02:
                print(f"case {seed}: {name} is planned to be {gain:.1%} faster", flush=True)
    print(f"{arguments.cases} cases; at most faster than what is chosen:")
    for name, gain in worst.items():
        print(f"{name:<16}{gain:>+8.1%}")


if __name__ == "__main__":
    main()
