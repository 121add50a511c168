"""`sp-lightning check --speed`: the speed of a machine, measured in three minutes, as one line to send.

It measures rates of the machine and steps of one decoder: plainly if it fits, and streamed within two memory budgets.
The line has no path and no name of a person or a machine, so that it can be pasted into a public form.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sp_lightning.losses import chunked_cross_entropy
from sp_lightning.pipeline import Pipeline, PipelineOptions, available_host_memory, is_out_of_memory, readable_bytes
from sp_lightning.pipeline.host_memory import total_host_memory, usable_cores
from sp_lightning.planning import AutoPlanner
from sp_lightning.planning.rates import measure

_SECONDS = 40.0  # the time that the steps of a run may take
_WARM_UP, _STEPS = 5, 10  # the planner has chosen after the first ones
_BYTES = 16  # bytes for a parameter in mixed precision with AdamW
_OF_RAM, _OF_GPU = 0.5, 0.7  # shares that the decoder may need
_BUDGETS = (0.25, 0.5)  # budgets of streamed runs, as shares of the memory that plain training needs


@dataclass(frozen=True)
class Shape:
    """The size of the decoder, and of a batch."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    length: int

    @property
    def parameters(self) -> int:
        """The approximate number of parameters."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width


ON_GPU = Shape(width=2048, layers=24, heads=16, vocabulary=32_000, rows=4, length=2048)
ON_CPU = Shape(width=128, layers=6, heads=4, vocabulary=512, rows=2, length=64)


class _Block(nn.Module):
    """A layer of a decoder, with norms, attention and two linear layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + added


class _Decoder(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return chunked_cross_entropy(x, self.embedding.weight, tokens, shift=True)


def speed(device: torch.device, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure a machine, report the progress, and return the figures; the last line is their JSON.

    Args:
        device: The GPU, or the CPU.
        tell: A function that gets each line.
    """
    on_cpu = device.type == "cpu"
    memory = None if on_cpu else _memory_of(device)
    shape = _that_fits(ON_CPU if on_cpu else ON_GPU, memory)
    tell("Measuring the rates of this machine ...")
    found: dict[str, Any] = {
        "sp_lightning": version("sp_lightning"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": None if on_cpu else torch.get_device_module(device).get_device_name(device),
        "gpu_bytes": memory,
        "ram_bytes": total_host_memory(),
        "cores": usable_cores(),
        "gb_per_second": measure(),
        "decoder": {**asdict(shape), "parameters": shape.parameters},
    }
    full = _BYTES * shape.parameters
    budgets: list[int | None] = [int(share * full) for share in _BUDGETS]
    if memory is None or full < _OF_GPU * memory:
        budgets.insert(0, None)
    found["runs"] = []
    for budget in budgets:
        way = "plain" if budget is None else f"streamed within {readable_bytes(budget)}"
        run = _measured(shape, device, budget)
        found["runs"].append({"budget_bytes": budget, **run})
        tell(f"{way}: {_in_words(run)}")
    tell("\nPaste this line into the form 'Numbers from your machine':\n" + json.dumps(found))
    return found


def _in_words(run: dict[str, Any]) -> str:
    if "error" in run:
        return str(run["error"])
    return f"{1000 * run['step_seconds']:.1f} ms a step, {run['tokens_per_second']:,.0f} tokens/s"


def _memory_of(device: torch.device) -> int:
    _, total = torch.get_device_module(device).mem_get_info(device)
    return int(total)


def _that_fits(shape: Shape, memory: int | None) -> Shape:
    """Return the shape with fewer layers if this machine cannot hold it: in CPU memory while it streams."""
    free = available_host_memory()
    room = _OF_RAM * free if free is not None else float("inf")
    layers = shape.layers
    while layers > 2 and _BYTES * Shape(**{**asdict(shape), "layers": layers}).parameters > room:
        layers -= 1
    return Shape(**{**asdict(shape), "layers": layers})


def _measured(shape: Shape, device: torch.device, budget: int | None) -> dict[str, Any]:
    """Train for some steps, plainly if there is no budget; return the costs of a step."""
    try:
        with _attached(shape, device, budget) as (model, pipeline):
            seconds = _seconds_of_steps(model, device, shape)
            speed_of_run = round(shape.rows * shape.length / seconds, 1)
            run: dict[str, Any] = {"step_seconds": round(seconds, 5), "tokens_per_second": speed_of_run}
            if pipeline is not None:
                summary = pipeline.summary()
                planned = None if summary.plan is None else round(summary.plan.step_seconds, 5)
                run |= {"k": summary.k, "units": summary.units, "planned_seconds": planned}
                run |= {"stay_on_gpu": len(summary.living), "updated_on_gpu": len(summary.visiting)}
            if device.type != "cpu":
                run["gpu_peak_bytes"] = torch.get_device_module(device).max_memory_allocated(device)
            return run
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"error": "out of memory"}


@contextmanager
def _attached(
    shape: Shape,
    device: torch.device,
    budget: int | None,
) -> Iterator[tuple[nn.Module, Pipeline | None]]:
    """Build the decoder, on the device or streamed to it; at the end, all of its memory is free."""
    torch.manual_seed(0)
    model = _Decoder(shape)
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    if budget is None:
        yield model.to(device), None
    else:
        options = PipelineOptions(memory_budget=budget)
        with Pipeline(model, device, options=options, planner=AutoPlanner()) as pipeline:
            yield model, pipeline
    del model
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _seconds_of_steps(model: nn.Module, device: torch.device, shape: Shape) -> float:
    """Return the median time of a step, clipped by norm, in bf16-mixed."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(shape.vocabulary, (shape.rows, shape.length), device=device)
    begins = [time.perf_counter()]
    for _ in range(_WARM_UP + _STEPS):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        begins.append(time.perf_counter())
        if begins[-1] - begins[0] > _SECONDS and len(begins) > 2:
            break
    seconds = [end - begin for begin, end in pairwise(begins)]
    return median(seconds[_WARM_UP:] or seconds[-1:])
