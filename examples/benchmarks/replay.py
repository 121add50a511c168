"""Price runs that others have published with the planner's clock, and write the table into docs/planning.md.

    python examples/benchmarks/replay.py             # print it
    python examples/benchmarks/replay.py --write     # and write it

The clock prices a run as if this package did it: same model, card and tokens in a step, and the optimizer where the
published run has it. What is not published is assumed: hosts as in `--host`, rows of 2,048 tokens, batches of 8,192.
A model reaches between half of what a card's maker states, which `--gpu` assumes, and all of it: hence two figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tables import print_table
from torch import nn

from sp_lightning import Assumptions, plan
from sp_lightning.planning.known import named_model, rates_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
BATCH = 8192


@dataclass(frozen=True)
class Run:
    """A published run."""

    system: str
    source: str
    gpu: str
    host: str
    model: str
    tokens: int  # in a step of the optimizer
    published: float  # tokens in a second
    streams: bool = True  # whether it hides the optimizer, as this package does; else the host steps after backward
    device_memory: str | None = None  # if it was capped
    others: Mapping[str, Any] = field(default_factory=dict)  # rates and choices that are known of it


LLMQ = ("LLMQ, bf16", "its benchmarks, arXiv 2512.15306")
FLEXTRAIN = ("FlexTrain", "its verified_runs_extra.md")
SLIDEFORMER = ("DeepSpeed ZeRO-3 offload", "SlideFormer's CSV")
FACTORY = ("LLaMA-Factory, ZeRO-3 offload", "LLMQ's benchmarks")
IN_16_BITS: dict[str, Any] = {"precision": "bf16-true", "moments": "int8"}  # the nearest that this package has
ZERO: dict[str, Any] = {"length": 1024}
OURS: dict[str, Any] = {"host_bandwidth": 100, "activations": "recompute", "gradient_clip_val": 1.0}
RUNS = [
    Run(*LLMQ, "RTX 4090", "desktop DDR5", "Qwen2.5-7B", 524_288, 2777, others=IN_16_BITS),
    Run(*LLMQ, "RTX 4090", "desktop DDR5", "Qwen2.5-14B", 524_288, 1348, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-1.5B", 524_288, 59_000, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-7B", 524_288, 14_000, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-14B", 524_288, 6300, others=IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3572, True, "16GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3652, True, "24GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3723, True, "31GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Qwen3-8B", 65_536, 3479, True, "24GiB", IN_16_BITS),
    Run(*FACTORY, "RTX 4090", "desktop DDR5", "Qwen2.5-7B", 524_288, 2523, False),
    Run(*FACTORY, "RTX 4090", "desktop DDR5", "Qwen2.5-14B", 524_288, 1135, False),
    Run(*SLIDEFORMER, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 8192, 914, False, None, ZERO),
    Run(*SLIDEFORMER, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 16_384, 1373, False, None, ZERO),
    Run(*SLIDEFORMER, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 32_768, 1791, False, None, ZERO),
    Run("this package, November 2026", "[performance](performance.md#on-an-h200)", "H200", "server DDR5",
        "Qwen2.5-1.5B", 8192, 9140, False, None, OURS),
]  # fmt: skip


@cache
def _model(name: str) -> nn.Module:
    return named_model(name)


def predicted(run: Run, of_maker: float) -> float:
    """Return tokens in a second, if the model reaches a part of the speed that the card's maker states."""
    rates = rates_of("gpus", run.gpu) | rates_of("hosts", run.host)
    rates["compute"] *= 2 * of_maker
    if run.device_memory is not None:
        rates["device_memory"] = run.device_memory
    if not run.streams:
        rates |= {"optimizer_on": "host", "gradient_clip_val": 1.0}
    # SlideFormer's batches are as large as its steps
    batch = run.tokens if run.source == "SlideFormer's CSV" else BATCH
    given = Assumptions(host_memory="1TiB", tokens=batch, accumulate=run.tokens // batch, **(rates | dict(run.others)))
    step = plan(_model(run.model), given).best.step
    return 0.0 if step is None else run.tokens / step.seconds


def lines() -> Iterator[str]:
    """Yield the table in Markdown."""
    yield "| published run | tokens in a step | tokens/s | predicted | predicted over published | source |"
    yield "|" + " --- |" * 6
    for run in RUNS:
        low, high = (predicted(run, of_maker) for of_maker in (0.5, 1.0))
        card = run.gpu if run.device_memory is None else f"{run.gpu} with {run.device_memory.replace('GiB', ' GiB')}"
        yield (
            f"| {run.system}: {run.model}, {card} | {run.tokens:,} | {run.published:,.0f} | {low:,.0f} to {high:,.0f} "
            f"| {low / run.published:.2f} to {high / run.published:.2f} | {run.source} |"
        )


if __name__ == "__main__":
    print_table(__file__, __doc__, DOCUMENT, lines())
