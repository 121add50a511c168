"""Writes down what the engine asks of its lanes in four steps of five models.

`python -m tests.golden_steps` rewrites golden_steps.txt. A change that only moves code leaves the file as it is.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning import optim
from sp_lightning.pipeline import Pipeline, PipelineOptions, Processes
from sp_lightning.pipeline.lanes.backend import Trace
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket

from .planning.parts import Fixed, decoder
from .processes import in_processes
from .zoo.blocks import WIDTH, chain
from .zoo.language import Experts
from .zoo.vision import resnet50

FILE = Path(__file__).with_name("golden_steps.txt")


@contextmanager
def requests() -> Iterator[dict[str, list[str]]]:
    """What lanes are asked for in this scope: for each kind of work, the units in the order in which they come."""
    asked: dict[str, list[str]] = defaultdict(list)

    def noted(request: Callable[..., Ticket]) -> Callable[..., Ticket]:
        def note(self: Trace, kind: Kind, name: str, *arguments: Any) -> Ticket:
            asked[kind.label].append(name)
            return request(self, kind, name, *arguments)

        return note

    names = ("upload", "download", "submit_to_lane", "work")
    with mock.patch.multiple(Trace, **{name: noted(getattr(Trace, name)) for name in names}):
        yield asked


def told(asked: dict[str, list[str]]) -> Iterator[str]:
    """A line for each kind of work, with the numbers in the names of units."""
    for kind in sorted(asked):
        numbers = ["".join(part for part in name.split(".") if part.isdecimal()) or name for name in asked[kind]]
        yield f"  {kind}: {' '.join(numbers)}"


def record(
    make: Callable[[], nn.Module],
    batch: dict[str, Tensor] | tuple[Tensor, ...],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    places: tuple[Any, ...] = (),
    clip: bool = False,
    accumulate: int = 1,
    autocast: bool = False,
    processes: bool = False,
    **options: Any,
) -> Iterator[str]:
    """Lines for each step of a model whose units are placed so from the second step on."""
    torch.manual_seed(0)
    model = make()
    planner = Fixed(*[(2,)] * accumulate, (2, *places))
    of_all = Processes(dist.get_world_size()) if processes else None
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(**options), planner=planner, processes=of_all)
    optimizer, optimizers = make_optimizer(model.parameters(), lr=1e-3), pipeline.optimizers
    for step in range(4):
        with requests() as asked:
            pipeline.meet_processes()
            for micro in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = model(**batch).loss if isinstance(batch, dict) else model(*batch)
                scope: Any = optimizers.clipping.measuring_norms() if clip else nullcontext()
                if not clip and micro == accumulate - 1:
                    scope = optimizers.stepping_in_backward(optimizer)
                with scope:
                    output.float().square().mean().backward()
            if clip:
                optimizers.clipping.clip_grad_norm(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            pipeline._engine.settle()
        yield f" step {step}"
        yield from told(asked)
    stats = pipeline.stats
    yield " " + " ".join(str(pipeline.summary()).split())
    yield f" {stats.bytes_to_device} bytes to the device, {stats.bytes_to_host} to the host"
    pipeline.detach()


def tokens() -> dict[str, Tensor]:
    numbers = torch.arange(96).view(4, 24) % 64
    return {"input_ids": numbers, "labels": numbers}


INT8, FUSED = partial(optim.AdamW, moments="int8"), partial(torch.optim.AdamW, fused=True)
MODELS: dict[str, Callable[[], Iterator[str]]] = {
    "decoder, clipped, accumulated, int8": lambda: record(
        decoder, tokens(), INT8, ((0, 5), (1, 2), (3, 4)), clip=True, accumulate=2
    ),
    "norms, bf16-mixed": lambda: record(
        partial(chain, 6), (torch.ones(4, WIDTH),), FUSED, ((0,), (2, 3)), autocast=True, clip=True
    ),
    "experts, in backward": lambda: record(
        lambda: nn.Sequential(*[Experts() for _ in range(4)]), (torch.ones(9, 12),), FUSED, ((), (1,))
    ),
    "CNN, recomputed": lambda: record(
        partial(resnet50, (1, 1, 1, 1)), (torch.ones(2, 3, 64, 64),), FUSED, activations="recompute"
    ),
}
OF_PROCESSES = "two processes, bf16-mixed"


def of_two_processes() -> Iterator[str]:
    return record(partial(chain, 4), (torch.ones(4, WIDTH),), FUSED, ((1,),), autocast=True, processes=True)


def written() -> dict[str, str]:
    """What the file says of each model."""
    models = FILE.read_text(encoding="utf-8").split("\n\n")
    return dict(model.strip().split("\n", 1) for model in models)


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OUTPUT] = folder
        in_processes([write_process])
        of_processes = (Path(folder) / "0").read_text(encoding="utf-8")
    lines = {name: "\n".join(make()) for name, make in MODELS.items()} | {OF_PROCESSES: of_processes}
    FILE.write_text("\n\n".join(f"{name}\n{told}" for name, told in lines.items()) + "\n", encoding="utf-8")


OUTPUT = "GOLDEN_STEPS_OUTPUT"


def write_process() -> None:
    """Write what one of two processes is asked for."""
    lines = "\n".join(of_two_processes())
    (Path(os.environ[OUTPUT]) / str(dist.get_rank())).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
