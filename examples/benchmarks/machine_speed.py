"""`sp-lightning check --speed`: how fast a machine is, in four minutes, as one line to send.

It measures rates of the machine and steps of one decoder: plainly if it fits, and streamed in three ways to train.
The line has no path and no name of a person or a machine, so that it can be pasted into a public form.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sp_lightning import chunked_cross_entropy
from sp_lightning.optim import AdamW
from sp_lightning.optim.one_kernel import is_possible
from sp_lightning.optim.passes import compiled_kernels
from sp_lightning.pipeline import Pipeline, PipelineOptions, available_host_memory, is_out_of_memory
from sp_lightning.pipeline.host_memory import total_host_memory, usable_cores
from sp_lightning.planning import AutoPlanner
from sp_lightning.planning.rates import measured_machine
from sp_lightning.timeline import break_down

_SECONDS = 40.0  # that the steps of a run may take
_WARM_UP, _STEPS, _RECORDED = 5, 8, 3  # the planner has chosen after the first ones
_BYTES = 16  # for a parameter in mixed precision with AdamW
_OF_RAM, _OF_GPU = 0.5, 0.7  # shares that the decoder may need
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FACTS = ("driver", "pcie_generation", "pcie_width", "power_limit_watts")
_QUERY = "driver_version,pcie.link.gen.current,pcie.link.width.current,power.limit"
_PRODUCTS = 20  # of two matrices, that are timed together


class _Way(NamedTuple):
    """A way to train the decoder."""

    name: str
    share: float | None  # of what plain training needs, the memory that is there; None is plain training
    in_bf16: bool = False  # with int8 moments, else in bf16-mixed with torch's AdamW
    clips: bool = True


_WAYS = (
    _Way("plain, bf16-mixed", None),
    _Way("streamed, bf16-mixed", 0.4),
    _Way("streamed, bf16-true and int8", 0.2, in_bf16=True),
    _Way("streamed, bf16-true and int8, not clipped", 0.2, in_bf16=True, clips=False),
)


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


ON_GPU = Shape(width=2048, layers=16, heads=16, vocabulary=32_000, rows=4, length=2048)
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
    machine = measured_machine()
    rates = {
        "host": machine.host,
        "up": machine.to_device,
        "down": machine.to_host,
        "both": machine.both,
        "ram": machine.host_memory,
    }
    found: dict[str, Any] = {
        "sp_lightning": version("sp_lightning"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "gpu": None if on_cpu else torch.get_device_module(device).get_device_name(device),
        **_facts(device),
        "gpu_bytes": memory,
        "ram_bytes": total_host_memory(),
        "cores": usable_cores(),
        "huge_pages": _chosen(_HUGE_PAGES),
        "numba": compiled_kernels() is not None,
        "gb_per_second": {name: _in_giga(rate) for name, rate in rates.items()},
        "product_tflops": _rounded(_product(device)),
        "decoder": {**asdict(shape), "parameters": shape.parameters},
    }
    full = _BYTES * shape.parameters
    found["runs"] = []
    for way in _WAYS:
        if way.share is None and memory is not None and full > _OF_GPU * memory:
            continue
        run = _measured(shape, device, way)
        found["runs"].append({**way._asdict(), **run})
        tell(f"{way.name}: {_in_words(run)}")
    tell(_as_arguments(found))
    found["one_kernel"] = is_possible()
    line = json.dumps(found, allow_nan=False)
    tell("\nPaste this line into the form 'Numbers from your machine':\n" + line)
    return found


def _as_arguments(found: dict[str, Any]) -> str:
    """Return the link, and the measured rates as arguments of `plan`."""
    rates = found["gb_per_second"]
    options = {"link": rates["up"], "host-bandwidth": rates["host"], "memory-bandwidth": rates["ram"]}
    typed = " ".join(f"--{option} {rate:g}" for option, rate in options.items() if rate is not None)
    link = f"PCIe {found['pcie_generation']}.0 x{found['pcie_width']}: " if found["pcie_width"] else ""
    return f"{link}`sp-lightning plan MODEL {typed}` plans with the rates of this machine"


def _in_giga(rate: float) -> float | None:
    """Return a rate in GB/s; None if it is not known, or too fast to be seen."""
    return _rounded(rate / 1e9) if 0 < rate < math.inf else None


def _rounded(value: float) -> float:
    """Round to four significant digits, so that a small figure of a slow machine does not become 0."""
    return float(f"{value:.4g}")


def _facts(device: torch.device) -> dict[str, str | None]:
    """Return what NVIDIA's tool says of a GPU."""
    said: list[str] = []
    if device.type == "cuda":
        command = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S603
            said = [word.strip() for word in output.strip().split(",")]
    return dict(zip(_FACTS, said if len(said) == len(_FACTS) else [None] * len(_FACTS), strict=True))


def _chosen(file: Path) -> str | None:
    """Return which of the words in a file of the kernel is in brackets."""
    with suppress(OSError, IndexError):
        return file.read_text(encoding="utf-8").split("[")[1].split("]")[0]
    return None


def _product(device: torch.device) -> float:
    """Return the TFLOP/s of a product of two matrices in bf16."""
    size = 256 if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(_PRODUCTS):
            result = matrix @ matrix
        result[0, 0].item()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 * _PRODUCTS / min(times) / 1e12


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


def _measured(shape: Shape, device: torch.device, way: _Way) -> dict[str, Any]:
    """Train for some steps; return what a step took, and where its time went."""
    budget = None if way.share is None else int(way.share * _BYTES * shape.parameters)
    api = None if device.type == "cpu" else torch.get_device_module(device)
    before = None if api is None else api.memory_allocated(device)
    try:
        with _attached(shape, device, way, budget) as (model, pipeline):
            seconds, numbers = _seconds_of_steps(model, device, shape, way, pipeline)
            step = median(seconds)
            run: dict[str, Any] = {
                "budget_bytes": budget,
                "step_seconds": _rounded(step),
                "spread": [_rounded(min(seconds)), _rounded(max(seconds))],
                "tokens_per_second": _rounded(shape.rows * shape.length / step),
            }
            if pipeline is not None:
                summary = pipeline.summary()
                planned = None if summary.plan is None else _rounded(summary.plan.step_seconds)
                run |= {"k": summary.k, "units": summary.units, "pinned": summary.pinned, "planned_seconds": planned}
                run |= {"stay_on_gpu": len(summary.living), "updated_on_gpu": len(summary.visiting), **numbers}
            if api is not None:
                retries = api.memory_stats(device).get("num_alloc_retries", 0)
                run |= {"gpu_bytes_before": before, "gpu_peak_bytes": api.max_memory_allocated(device)}
                run["allocation_retries"] = retries
            return run
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"error": "out of memory"}


@contextmanager
def _attached(
    shape: Shape, device: torch.device, way: _Way, budget: int | None
) -> Iterator[tuple[nn.Module, Pipeline | None]]:
    """Build the decoder, on the device or streamed to it; at the end, all of its memory is free."""
    torch.manual_seed(0)
    model = _Decoder(shape).to(torch.bfloat16 if way.in_bf16 else torch.float32)
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


def _seconds_of_steps(
    model: nn.Module, device: torch.device, shape: Shape, way: _Way, pipeline: Pipeline | None
) -> tuple[list[float], dict[str, Any]]:
    """Return the times of steps, and where the time of some more went if they are streamed."""
    parameters = [*model.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, fused=True)
    if way.in_bf16:
        optimizer = AdamW(parameters, moments="int8")
    tokens = torch.randint(shape.vocabulary, (shape.rows, shape.length), device=device)

    def step() -> None:
        with nullcontext() if way.in_bf16 else torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        if way.clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    begins = [time.perf_counter()]
    for _ in range(_WARM_UP + _STEPS):
        step()
        begins.append(time.perf_counter())
        if begins[-1] - begins[0] > _SECONDS and len(begins) > 2:
            break
    seconds = [end - begin for begin, end in pairwise(begins)]
    seconds = seconds[_WARM_UP:] or seconds[-1:]
    if pipeline is None:
        return seconds, {}
    with pipeline.record() as recording:
        for _ in range(_RECORDED):
            step()
    recording.steps = recording.steps[1:] or recording.steps
    numbers = break_down(recording)
    lanes = {lane.value: _rounded(busy / numbers.steps) for lane, busy in numbers.busy.items()}
    bottleneck = None if numbers.bottleneck is None else numbers.bottleneck.value
    stalls = {cause: _rounded(stalled / numbers.steps) for cause, stalled in numbers.stalls.items()}
    return seconds, {"lane_seconds": lanes, "stall_seconds": stalls, "bottleneck": bottleneck}
