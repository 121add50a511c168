"""`sp-lightning check`: does a machine train with the numbers of plain training, wherever units are updated?

A small model is trained plainly, and then streamed in every way. Losses, the gradients of the first step and the
weights after the last one are compared. On an accelerator, the CPU's AdamW rounds in another way than the GPU's, as
torch's kernels do: weights that the CPU updates may differ by that, and by nothing else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from sp_lightning.check_program.compare import relative_difference
from sp_lightning.optim import AdamW
from sp_lightning.optim.of_torch import has_torchs_bits
from sp_lightning.pipeline import Engine, Pipeline, PipelineOptions, Planner, WindowPlan, readable_bytes
from sp_lightning.pipeline.lanes.accelerator import make_backend
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.planning import AutoPlanner

_STEPS = 8
_UPLOADS = 64
_ON_GPU = "updated on the GPU"
_ROUNDS_OTHERWISE = "this CPU's AdamW rounds in another way, so units are updated elsewhere"
_STAYS = "stays on the GPU"
# two kernels for AdamW may be this far apart after these steps, as a part of the largest weight
_ROUNDING = 1e-5


@dataclass
class _Placed(Planner):
    """Has all units updated on the GPU, or has them stay there, from the second step on."""

    visit: bool

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        names = tuple(unit.name for unit in engine.arrangement.units) if engine.stats.steps else ()
        return WindowPlan(2, visiting=names) if self.visit else WindowPlan(2, on_device=names)


class _Trained(NamedTuple):
    """The results of a run, in CPU memory."""

    first: Sequence[Tensor]  # the loss and the gradients of the first step
    weights: Sequence[Tensor]
    words: str  # its costs
    placed: int = 0  # GPU updates, and units that stay on the GPU


def check(device: torch.device) -> bool:
    """Print a line for each way, and one to paste into an issue; tell whether all of them train as plain training."""
    anywhere, on_cpu = PipelineOptions(), PipelineOptions(k=2, optimizer_on="host")
    ways = {
        "updated on the CPU": on_cpu,
        "recomputed": replace(on_cpu, activations="recompute"),
        "offloaded": replace(on_cpu, activations="offload"),
        _ON_GPU: anywhere,
        _STAYS: anywhere,
        "automatic": anywhere,
    }
    wrong: list[str] = []
    right = skipped = 0
    for precision in ("32-true", "bf16-mixed"):
        plain = _train(device, precision)
        print(f"{precision}, plain training: {plain.words}")
        for way, options in ways.items():
            if way == _ON_GPU and not has_torchs_bits(AdamW.update, torch.float32):
                print(f"  {way:<19} skipped: {_ROUNDS_OTHERWISE}")
                skipped += 1
                continue
            places = way in (_ON_GPU, _STAYS)
            planner = _Placed(way == _ON_GPU) if places else AutoPlanner()
            streamed = _train(device, precision, options, planner)
            is_right, verdict = _judge(plain, streamed, device, places)
            right += is_right
            if not is_right:
                wrong.append(f"{way} in {precision}")
            print(f"  {way:<19} {verdict:<23} {streamed.words}")
    with closing(make_backend(device, "auto", processes=1, debug=False)) as backend:
        lost = 0 if device.type == "cpu" else lost_uploads(backend, device)
    if lost:
        print(f"{lost} of {_UPLOADS} copies from pinned memory arrived on the GPU with other bytes: see docs/limits.md")
        wrong.append("copies from pinned memory")
    outcome = f"wrong: {', '.join(wrong)}" if wrong else f"right in {right} ways"
    if skipped and not wrong:
        outcome += f"; {skipped} do not apply here, because {_ROUNDS_OTHERWISE}"
    print(f"\n{versions_and_machine(device)}: {outcome}")
    return not wrong


def versions_and_machine(device: torch.device) -> str:
    """Return the words with which the last line begins, the one to paste into an issue."""
    machine = "the CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return f"sp-lightning {version('sp_lightning')}, torch {torch.__version__}, {machine}"


def lost_uploads(backend: Backend, device: torch.device) -> int:
    """Count copies to the GPU that do not arrive: under WSL2, after memory was pinned often, some silently did not."""
    lost = 0
    for number in range(_UPLOADS):
        memory = torch.full((1 << 20,), number, dtype=torch.uint8)
        is_pinned = backend.pin(memory)
        arrived = torch.full_like(memory, 255, device=device)
        arrived.copy_(memory, non_blocking=True)
        lost += not torch.equal(arrived.cpu(), memory)  # waits for the copy
        if is_pinned:
            backend.unpin(memory)
    return lost


def _train(
    device: torch.device, precision: str, options: PipelineOptions | None = None, planner: Planner | None = None
) -> _Trained:
    """Train a model of norms and layers for some steps; plainly, if there are no options."""
    on_cpu = device.type == "cpu"
    width = 64 if on_cpu else 256
    torch.manual_seed(0)
    layers = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = nn.Sequential(*[nn.Sequential(*copy.deepcopy(layers)) for _ in range(8)])
    x = torch.randn(16, width).to(device)
    if not on_cpu:
        torch.get_device_module(device).reset_peak_memory_stats(device)
    pipeline = None if options is None else Pipeline(model, device, options=options, planner=planner)
    if pipeline is None:
        model.to(device)
    # epsilon is above most gradients, or Adam would take the rounding of the smallest for their sign
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3, fused=on_cpu or None)
    first: list[Tensor] = []
    begins: list[float] = []
    for _ in range(_STEPS):
        begins.append(time.perf_counter())
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(x).float().square().mean()
        loss.backward()
        if not first:
            gradients = [weight.grad for weight in model.parameters()]
            first = [each.detach().cpu().clone() for each in (loss, *gradients) if each is not None]
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    seconds = median(end - begin for begin, end in pairwise(begins[_STEPS // 2 :]))
    words = f"{1000 * seconds:.1f} ms a step"
    if not on_cpu:
        words += f", {readable_bytes(torch.get_device_module(device).max_memory_allocated(device))} of GPU memory"
    placed = 0
    if pipeline is not None:
        summary, visits = pipeline.summary(), pipeline.stats.visits
        placed = visits + len(summary.living)
        words += f", {visits} GPU updates, {len(summary.living)} units stay on the GPU"
        if summary.plan is not None and summary.plan.step_seconds:
            words += f", planned {1000 * summary.plan.step_seconds:.1f} ms"
        pipeline.detach()
    return _Trained(first, [weight.detach().cpu() for weight in model.parameters()], words, placed)


def _judge(plain: _Trained, streamed: _Trained, device: torch.device, places: bool) -> tuple[bool, str]:
    """Tell whether a way is right, and say how its numbers compare; a way that `places` units must have placed some."""
    if places and not streamed.placed:
        return False, "NO UNIT WAS THERE"
    same = len(plain.first) == len(streamed.first) and all(map(torch.equal, plain.first, streamed.first))
    apart = max(map(relative_difference, plain.weights, streamed.weights))
    if not same or apart > (0 if device.type == "cpu" else _ROUNDING):
        return False, "OTHER NUMBERS"
    return True, f"AdamW's rounding, {apart:.0e}" if apart else "same bits"
