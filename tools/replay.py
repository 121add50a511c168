"""Runs that others have published, and how fast the planner's clock says that this package would do them.

The clock prices a run with the same model, GPU and tokens in a step, and with the optimizer where the published run has
it. What is not published is assumed: hosts as in `--host`, rows of 2,048 tokens, batches of 8,192. A model reaches
between the low and the high share of the maker's peak that `plan` assumes of such a GPU: hence two figures.
`plan_machines.py` writes the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from sp_lightning import Assumptions
from sp_lightning.planning.assumptions import ladder
from sp_lightning.planning.known import named_model, rates_of, rates_of_gpu
from sp_lightning.planning.report import Row, plan_row

BATCH = 8192


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        system: What trained.
        source: Where its figure is published.
        when: When that was, or when it was last read there.
        gpu: The GPU.
        host: The host, as assumed.
        model: The model.
        tokens: In a step of the optimizer.
        published: Tokens in a second.
        streams: Whether it hides the optimizer, as this package does; else the host steps after backward.
        device_memory: If it was capped.
        others: Rates and choices that are known of it.
    """

    system: str
    source: str
    when: str
    gpu: str
    host: str
    model: str
    tokens: int
    published: float
    streams: bool = True
    device_memory: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def card(self) -> str:
        """The GPU, and what it was capped to."""
        cap = self.device_memory
        return self.gpu if cap is None else f"{self.gpu} with {cap.replace('GiB', ' GiB')}"


LLMQ = ("LLMQ, bf16", "[its benchmarks](https://github.com/IST-DASLab/llmq)", "May 2026")
FLEXTRAIN = ("FlexTrain", "[its verified_runs_extra.md](https://github.com/als244/flextrain)", "May 2026")
# gradients were copied synchronously until DeepSpeed#8207
DEEPSPEED = (
    "DeepSpeed ZeRO-3 offload",
    "[SlideFormer's CSV](https://github.com/RegiaYoung/SlideFormer)",
    "February 2026, before its asynchronous gradient copies",
)
FACTORY = ("LLaMA-Factory, ZeRO-3 offload", "LLMQ's benchmarks", "May 2026")
TORCHTUNE = ("torchtune, paged 8-bit AdamW", "[its README](https://github.com/pytorch/torchtune)", "July 2025")
TORCHTUNE_LORA = ("torchtune, LoRA without offload", *TORCHTUNE[1:])
IN_16_BITS: dict[str, Any] = {"precision": "bf16-true", "moments": "int8"}  # the nearest that this package has
ADAPTERS: dict[str, Any] = {"precision": "bf16-true", "moments": "fp32", "lora": 8}
ZERO: dict[str, Any] = {"length": 1024}
OURS: dict[str, Any] = {"host_bandwidth": 100, "activations": "recompute", "gradient_clip_val": 1.0}
RUNS = [
    Run(*LLMQ, "RTX 4090", "desktop DDR5", "Qwen2.5-7B", 524_288, 2777, others=IN_16_BITS),
    Run(*LLMQ, "RTX 4090", "desktop DDR5", "Qwen2.5-14B", 524_288, 1348, others=IN_16_BITS),
    Run(*LLMQ, "RTX 5090", "desktop DDR5", "Qwen2.5-7B", 524_288, 3100, others=IN_16_BITS),
    Run(*LLMQ, "RTX PRO 6000", "workstation DDR5", "Qwen2.5-7B", 524_288, 8000, others=IN_16_BITS),
    Run(*LLMQ, "RTX PRO 6000", "workstation DDR5", "Qwen2.5-14B", 524_288, 4000, others=IN_16_BITS),
    Run(*LLMQ, "L40S", "server DDR5", "Qwen2.5-7B", 524_288, 3900, others=IN_16_BITS),
    Run(*LLMQ, "L40S", "server DDR5", "Qwen2.5-14B", 524_288, 1500, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-1.5B", 524_288, 59_000, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-7B", 524_288, 14_000, others=IN_16_BITS),
    Run(*LLMQ, "H100", "server DDR5", "Qwen2.5-14B", 524_288, 6300, others=IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3572, True, "16GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3643, True, "20GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3652, True, "24GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Llama-3.1-8B", 65_536, 3723, True, "31GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Qwen3-8B", 65_536, 3479, True, "24GiB", IN_16_BITS),
    Run(*FLEXTRAIN, "RTX 5090", "desktop DDR5", "Gemma-3-12B-it", 32_768, 1597, others=IN_16_BITS),
    Run(*FACTORY, "RTX 4090", "desktop DDR5", "Qwen2.5-7B", 524_288, 2523, False),
    Run(*FACTORY, "RTX 4090", "desktop DDR5", "Qwen2.5-14B", 524_288, 1135, False),
    Run(*DEEPSPEED, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 8192, 914, False, None, ZERO),
    Run(*DEEPSPEED, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 16_384, 1373, False, None, ZERO | {"tokens": 16_384}),
    Run(*DEEPSPEED, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 32_768, 1791, False, None, ZERO | {"tokens": 32_768}),
    Run(*TORCHTUNE, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 4096, 1650, others=IN_16_BITS),
    Run(*TORCHTUNE, "RTX A6000", "workstation DDR5", "Llama-3.1-8B", 4096, 2579, others=IN_16_BITS),
    Run(*TORCHTUNE_LORA, "RTX 4090", "desktop DDR5", "Llama-3.1-8B", 4096, 3083, others=ADAPTERS),
    Run(*TORCHTUNE_LORA, "RTX A6000", "workstation DDR5", "Llama-3.1-8B", 4096, 4699, others=ADAPTERS),
    Run("this package", "[performance](../docs/performance.md#on-an-h200)", "November 2026, before it was revised",
        "H200", "server DDR5", "Qwen2.5-1.5B", 8192, 9140, False, None, OURS),
]  # fmt: skip


@cache
def _model(name: str) -> nn.Module:
    return named_model(name)


def first_that_fits(module: nn.Module, given: Assumptions) -> Row:
    """Plan with the first way to keep moments that fits, or else with the most compact one."""
    rows = (plan_row(module, way) for way in ladder(given))
    last = next(rows)
    while last.step is None and (row := next(rows, None)) is not None:
        last = row
    return last


def predicted(run: Run) -> tuple[float, float]:
    """Return tokens in a second, at the lowest and the highest speed that such a GPU is assumed to reach."""
    rates = {**rates_of_gpu(run.gpu), **rates_of("hosts", run.host), "desktop": False}
    if run.device_memory is not None:
        rates["device_memory"] = run.device_memory
    if not run.streams:
        rates |= {"optimizer_on": "host", "gradient_clip_val": 1.0}
    rates["tokens"] = min(BATCH, run.tokens)
    rates |= run.others
    given = Assumptions(host_memory="1TiB", accumulate=run.tokens // rates["tokens"], **rates)
    return first_that_fits(_model(run.model), given).tokens_per_second
