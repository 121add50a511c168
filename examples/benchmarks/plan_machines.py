"""Plan well-known models on well-known machines, and write the table into docs/choosing.md.

    python examples/benchmarks/plan_machines.py             # print it
    python examples/benchmarks/plan_machines.py --write     # and write it

Each step is clipped, has 8,192 tokens in rows of 2,048, and a chunked loss. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tables import print_table
from torch import nn

from sp_lightning import Assumptions, plan
from sp_lightning.planning.known import named_model, rates_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
MACHINES = [  # a card, a host and its memory
    ("RTX 3060", "desktop DDR4", "32GiB"),
    ("RTX 3090", "desktop DDR4", "64GiB"),
    ("RTX 4060 Ti", "desktop DDR5", "64GiB"),
    ("RTX 4090", "desktop DDR5", "64GiB"),
    ("RTX 4090", "desktop DDR5", "128GiB"),
    ("RTX 5090", "desktop DDR5", "192GiB"),
    ("RTX 6000 Ada", "workstation DDR5", "256GiB"),
    ("A10", "server DDR4", "64GiB"),
    ("L40S", "server DDR5", "256GiB"),
    ("A100", "server DDR4", "512GiB"),
    ("H100", "server DDR5", "256GiB"),
    ("H200", "server DDR5", "512GiB"),
]
MODELS = [  # and the rank of adapters; None trains all weights
    ("Qwen3-1.7B", None),
    ("Qwen3-4B", None),
    ("Llama-3.1-8B", None),
    ("Qwen3-14B", None),
    ("Qwen3-32B", None),
    ("Llama-3.1-70B", None),
    ("Llama-3.1-8B", 16),
    ("Qwen3-32B", 16),
]


def cell(model: nn.Module, machine: tuple[str, str, str], lora: int | None) -> str:
    """Return tokens in a second and how moments are kept, or what is too small."""
    gpu, host, memory = machine
    rates = rates_of("gpus", gpu) | rates_of("hosts", host)
    given = Assumptions(host_memory=memory, tokens=8192, gradient_clip_val=1.0, lora=lora, **rates)
    best = plan(model, given).best
    if best.step is None:
        return "host" if "of host memory" in best.missing else "device"
    moments = "" if best.given.moments is None else f" {best.given.moments}"
    return f"{given.tokens / best.step.seconds:,.0f}{moments}"


def lines() -> Iterator[str]:
    """Yield the table in Markdown."""
    titles = [name if lora is None else f"{name}, LoRA" for name, lora in MODELS]
    yield f"| machine | {' | '.join(titles)} |"
    yield "|" + " --- |" * (1 + len(MODELS))
    models = {name: named_model(name) for name, _ in MODELS}
    for machine in MACHINES:
        cells = [cell(models[name], machine, lora) for name, lora in MODELS]
        yield f"| {machine[0]}, {machine[1]}, {machine[2].replace('GiB', ' GiB')} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print_table(__file__, __doc__, DOCUMENT, lines())
