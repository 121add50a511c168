"""Models large enough that copies can be seen, and training with weights that are moved by hand, streamed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_map_only

from sp_lightning.pipeline import Pipeline, PipelineOptions, Planner

from ..helpers import Trace, is_block, never_waiting, note_gradients, note_outputs, note_state
from ..second_device import IN_USE
from ..zoo import Batch, Case
from ..zoo.blocks import Block, Chain

BLOCKS, ROWS = 12, 64
WIDTH, HIDDEN = (256, 1024) if IN_USE else (1024, 4096)  # large enough that copies can be seen
BLOCK_BYTES = 4 * (2 * WIDTH * HIDDEN + 3 * WIDTH + HIDDEN)


class LazyBlock(Block):
    """Lets the device sleep before it computes: a copy that does not wait would overwrite weights still in use."""

    cycles = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return super().forward(x)


def big_chain(cycles: int = 0) -> Chain:
    """Twelve blocks, each of 34 MB where there is a GPU."""
    torch.manual_seed(0)
    model = Chain(LazyBlock(WIDTH, HIDDEN) for _ in range(BLOCKS))
    for block in model.blocks:
        block.cycles = cycles
    return model


@contextmanager
def on_device(
    model: nn.Module, device: torch.device, planner: Planner | None = None, **options: Any
) -> Iterator[Pipeline]:
    """A pipeline on the device, one unit per block; always detached."""
    choices = PipelineOptions(**{"k": 2, "k_prime": 1, "units": is_block, **options})
    with Pipeline(model, device, options=choices, planner=planner) as pipe:
        yield pipe


def micro_step(pipe: Pipeline, x: Tensor) -> Tensor:
    """One forward and backward."""
    with pipe.step():
        loss = pipe.module(x).square().mean()
        loss.backward()
    return loss.detach()


def steps_that_wait_for_nothing(pipe: Pipeline, device: torch.device, steps: int, first: int) -> None:
    """From the `first` of these steps on, any call that makes the host wait is an error."""
    x = torch.randn(ROWS, WIDTH, device=device)
    optimizer = SGD(pipe.module.parameters(), lr=0.1)
    for step in range(steps):
        pipe.backend.drain()  # the optimizer's last step, which may take longer than the device's
        with never_waiting(device) if step >= first else nullcontext():
            micro_step(pipe, x)
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, device: torch.device, steps: int = 3, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of a short training."""
    losses = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    with on_device(model, device, **options) as pipe:
        optimizer = SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(steps):
            losses.append(micro_step(pipe, x).cpu())
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


@cache
def quick_training(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Of the twelve blocks, with all of them there and no delay: what any other training of theirs must give."""
    return train(big_chain(), device, k=BLOCKS)


STEPS = 3


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


class OnDevice:
    """The reference: weights on the device, masters, gradients and optimizer on the CPU, moved by hand."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.masters = case.model()
        self.model = case.model().to(device)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each master and its copy on the device."""
        return list(zip(self.masters.parameters(), self.model.parameters(), strict=True))

    def step(self) -> AbstractContextManager[None]:
        """Nothing to open."""
        return nullcontext()

    def before(self) -> None:
        """Send the weights up; gradients stay there until the optimizer's are zeroed."""
        for master, copy in self.pairs():
            copy.data.copy_(master.data)
            if master.grad is None:
                copy.grad = None

    def after(self) -> None:
        """Bring down the gradients that were accumulated on the device."""
        for master, copy in self.pairs():
            master.grad = None if copy.grad is None else copy.grad.to("cpu", copy=True)


class Streamed:
    """The same through a pipeline."""

    def __init__(self, case: Case, device: torch.device, options: PipelineOptions) -> None:
        self.masters = self.model = case.model()
        self.pipe = Pipeline(self.model, device, options=options)
        self.step: Callable[[], AbstractContextManager[None]] = self.pipe.step

    def before(self) -> None:
        """The pipeline sends weights up by itself."""

    def after(self) -> None:
        """The pipeline brings gradients down by itself."""


def train_case(case: Case, device: torch.device, trainer: OnDevice | Streamed, autocast: torch.dtype | None) -> Trace:
    """Train for some steps, evaluate, and write everything down."""
    trace: Trace = {}
    parameters = dict(trainer.masters.named_parameters())
    optimizers = case.optimizers(trainer.masters)
    batches = iter(case.batches(STEPS * case.accumulate))
    torch.manual_seed(7)
    for step in range(STEPS):
        for micro in range(case.accumulate):
            trainer.before()
            cast = torch.autocast(device.type, dtype=autocast) if autocast is not None else nullcontext()
            with trainer.step():
                losses = case.forward_backward(trainer.model, on(device, next(batches)), cast)
            trainer.after()
            note_outputs(trace, f"step {step} / micro-batch {micro} / loss", losses)
            note_gradients(trace, f"step {step} / micro-batch {micro}", parameters)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        note_state(trace, f"step {step}", trainer.masters, optimizers)
    trainer.before()
    trainer.model.eval()
    with torch.inference_mode(), trainer.step():
        note_outputs(trace, "evaluation", case.call(trainer.model, on(device, case.batches(1)[0])))
    return {label: value for label, value in trace.items() if " / buffer / " not in label}
