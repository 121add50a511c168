"""Training in several processes, each with data of its own: streamed, and in a plain loop that averages by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from sp_lightning.pipeline import Pipeline, PipelineOptions, Planner, Processes

from ...helpers import Trace, frozen, note_gradients, note_state
from ...zoo.blocks import WIDTH, Block

Model = Callable[[], nn.Module]


def chain(blocks: int = 4) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(5, WIDTH, generator=generator)


def average_gradients(model: nn.Module) -> None:
    """What the others do after backward, in plain sight. A gradient that nobody has stays None."""
    count = dist.get_world_size()
    for parameter in model.parameters():
        everyones: list[Tensor | None] = [None] * count
        dist.all_gather_object(everyones, parameter.grad)
        parts = [gradient * (1 / count) for gradient in everyones if gradient is not None]
        if parts:
            parameter.grad = reduce(torch.add, parts)


def train(
    build: Model,
    options: PipelineOptions | None,
    accumulate: int = 1,
    clip: float | None = None,
    device: str = "cpu",
    on_a_machine: int | None = None,
    in_backward: bool = False,
    planner: Planner | None = None,
) -> Trace:
    """Three steps with data of each process's own; without options in a plain loop.

    The optimizer's state is compared in the first process: of those that share weights, no other has it. Gradients are
    not looked at if units are stepped in backward.
    """
    trace: Trace = {}
    torch.manual_seed(0 if options is None else dist.get_rank())  # others take the first one's weights
    model = build()
    if options is None:
        model.to(device)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    processes = Processes(on_a_machine or dist.get_world_size())
    pipeline = (
        None if options is None else Pipeline(model, device, options=options, processes=processes, planner=planner)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())  # which layers a model leaves out
    for step in range(3):
        if pipeline is not None:
            pipeline.meet_processes()
        for micro in range(accumulate):
            processes.averages = micro == accumulate - 1  # of their sum
            is_last = in_backward and micro == accumulate - 1
            early = pipeline.optimizers.stepping_in_backward(optimizer) if pipeline and is_last else nullcontext()
            with early, nullcontext() if pipeline is None else pipeline.step():
                loss = model(rows(generator).to(device)).square().mean()
                with nullcontext() if pipeline is None else pipeline.in_all_processes():
                    loss.backward()
            trace[f"step {step} / loss {micro}"] = frozen(loss)
        if pipeline is None:
            average_gradients(model)
        if not in_backward:
            note_gradients(trace, f"step {step}", dict(model.named_parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    if pipeline is not None:
        pipeline.detach()
    note_state(trace, "end", model, [] if dist.get_rank() else [optimizer])
    return trace
