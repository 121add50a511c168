"""Several processes under Fabric: each number is that of Fabric's `DDPStrategy`, in every process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning.fabric import SuperpipelineStrategy

from .helpers import Trace, assert_close_trace, assert_same_trace, frozen, note_outputs, note_state
from .lightning_modules import WIDTH, Block
from .processes import in_processes

Program = Callable[[Fabric, Trace], None]


def assert_as_ddp(program: Program, compare: Any = assert_same_trace, **arguments: Any) -> None:
    traces: list[Trace] = [{}, {}]
    ours = SuperpipelineStrategy(k=2, debug=True)
    for strategy, trace in zip((DDPStrategy(find_unused_parameters=True), ours), traces, strict=True):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **arguments)
        fabric.launch()
        torch.manual_seed(7)
        program(fabric, trace)
    if dist.get_rank():  # the first process has the optimizer's state, for all of them
        traces = [{k: v for k, v in trace.items() if "/ optimizer" not in k} for trace in traces]
    compare(*traces)


def trains(fabric: Fabric, trace: Trace, accumulate: int = 1, clip: float | None = None) -> None:
    """With BatchNorm's buffers, a loader that Fabric divides, an evaluation, and a file that is saved and loaded."""
    built = nn.Sequential(*[Block() for _ in range(4)])
    # sums over several batches are rounded otherwise, which AdamW blows up
    model, optimizer = fabric.setup(built, (SGD if accumulate > 1 else AdamW)(built.parameters(), lr=1e-2))
    data = TensorDataset(torch.randn(32, WIDTH), torch.randn(32, WIDTH))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    for epoch in range(2):
        built.train()
        for number, (x, y) in enumerate(loader, start=1):
            with fabric.no_backward_sync(model, enabled=number % accumulate != 0):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss)
            note_outputs(trace, f"{epoch} / {number}", [loss, fabric.all_reduce(loss.detach().clone())])
            if number % accumulate == 0:
                if clip is not None:
                    trace[f"{epoch} / {number} / norm"] = frozen(fabric.clip_gradients(model, optimizer, max_norm=clip))
                optimizer.step()
                optimizer.zero_grad()
        path, state = f"{type(fabric.strategy).__name__}{epoch}", {"model": model, "optimizer": optimizer}
        fabric.save(fabric.broadcast(os.path.abspath(path)), state)
        if fabric.is_global_zero or isinstance(fabric.strategy, DDPStrategy):
            with torch.no_grad():
                built[0].up.weight.zero_()  # as if another run began
        assert fabric.load(path, state) == {}
        built.eval()
        with torch.no_grad():
            note_outputs(trace, f"{epoch} / evaluation", fabric.all_gather(model(torch.ones(2, WIDTH))))
    note_state(trace, "end", built, [optimizer.optimizer])


def plays(fabric: Fabric, trace: Trace) -> None:
    """Two models, each with an optimizer, one of which the first process evaluates alone."""
    networks = [nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]) for _ in range(2)]
    (made, generate), (judge, decide) = [fabric.setup(net, SGD(net.parameters(), lr=0.1)) for net in networks]
    for step in range(3):
        x = torch.randn(3, WIDTH) + fabric.global_rank
        decide.zero_grad()
        fake = made(x)
        fabric.backward(judge(x).square().mean() - judge(fake.detach()).mean())
        decide.step()
        generate.zero_grad()
        fooled = judge(fake).mean()
        fabric.backward(fooled)
        generate.step()
        with torch.no_grad():
            note_outputs(trace, f"{step}", [fooled, made(x) if fabric.is_global_zero else x])
        fabric.barrier()
    for number, network in enumerate(networks):
        note_state(trace, f"{number}", network, [])


def clamps(fabric: Fabric, trace: Trace) -> None:
    """The program writes to weights after each backward; Fabric does not know the optimizer."""
    built = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model, optimizer = fabric.setup_module(built), SGD(built.parameters(), lr=0.1)
    for number in range(6):
        loss = model(torch.randn(3, WIDTH) + fabric.global_rank).square().mean()
        fabric.backward(loss)
        note_outputs(trace, f"{number}", [loss])
        if number % 3 == 1:
            optimizer.step()
        if number % 3:
            optimizer.zero_grad()
            with torch.no_grad():
                for weight in built.parameters():
                    weight.clamp_(-0.1, 0.1)
    note_state(trace, "end", built, [])


def as_ddp() -> None:
    assert_as_ddp(trains)
    assert_as_ddp(partial(trains, accumulate=2, clip=0.1), assert_close_trace)
    assert_as_ddp(partial(trains, clip=0.1), precision="bf16-mixed")
    assert_as_ddp(plays)
    assert_as_ddp(clamps)


@pytest.mark.usefixtures("server")
def test_two_processes() -> None:
    in_processes([as_ddp])
