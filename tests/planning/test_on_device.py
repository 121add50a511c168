"""Units that live on the device (`optimizer_on="auto"`): chosen where they make steps faster, and exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.planning import AutoPlanner

from ..helpers import is_block
from ..simulated import UNIT_BYTES
from ..zoo.blocks import Chain, chain
from .parts import Blocks, Fixed

SLOW_HOST = Blocks(forward=0.1, backward=0.9, up=0.1, down=0.9, step=2.0, units=12)
SLOW_COPIES = Blocks(forward=0.4, backward=0.8, up=1.5, down=0.9, step=0.5, units=12)


def attach() -> tuple[Chain, Pipeline]:
    """Six blocks, of which two live on the device from the second step on."""
    torch.manual_seed(0)
    model = chain(6, 16, 32)
    options = PipelineOptions(units=is_block)
    backend = HostBackend(poison=True, max_delay=0.002)
    return model, Pipeline(model, "cpu", options=options, backend=backend, planner=Fixed((2, 1), (2, 1, (), (1, 4))))


def take_steps(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("blocks", [SLOW_HOST, SLOW_COPIES], ids=["slow host", "slow copies"])
def test_spare_memory_makes_steps_faster(blocks: Blocks) -> None:
    budget = 30 * UNIT_BYTES
    streamed = blocks.train(AutoPlanner(), memory_budget=budget, optimizer_on="host")
    there = blocks.train(AutoPlanner(), memory_budget=budget)
    plan = there.summary.plan
    assert plan is not None
    assert plan.on_device
    assert plan.on_device_bytes == 2 * UNIT_BYTES * len(plan.on_device), "weight and gradient: SGD keeps nothing"
    assert there.counted <= budget
    assert plan.device_bytes == pytest.approx(there.counted, rel=0.05)
    assert there.seconds[-1] == pytest.approx(plan.step_seconds, rel=0.1)
    assert there.seconds[-1] < 0.8 * streamed.seconds[-1]


def test_units_on_the_device_do_not_travel() -> None:
    model, pipeline = attach()
    optimizer = AdamW(model.parameters())
    take_steps(model, optimizer, 2)
    living = [model.blocks[1], model.blocks[4]]
    on_device = pipeline.arrangement.parameters_on_device
    assert {id(p) for block in living for p in block.parameters()} == set(map(id, on_device))
    before = pipeline.stats.bytes_to_device, pipeline.stats.bytes_to_host
    take_steps(model, optimizer, 2)
    moved = pipeline.stats.bytes_to_device - before[0], pipeline.stats.bytes_to_host - before[1]
    streamed = sum(p.nbytes for block in model.blocks for p in block.parameters() if block not in living)
    assert moved[1] <= 2 * streamed + 2 * 6 * 64 * 8, "gradients of four blocks, with room between them"
    assert all(type(p) is nn.Parameter for block in living for p in block.parameters()), "nothing guards them"
    pipeline.detach()


def test_detaching_restores_parameters_gradients_and_state() -> None:
    """Also in the middle of an accumulation, and an optimizer that has not stepped yet finds its state there."""
    model, pipeline = attach()
    optimizer, late = AdamW(model.parameters()), SGD(model.parameters(), 0.1, momentum=0.9)
    take_steps(model, optimizer, 2)
    model(torch.ones(4, 16)).square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    pipeline.detach()
    assert all(
        p.grad is not None and bool((p.grad == g).all()) for p, g in zip(model.parameters(), gradients, strict=True)
    )
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for each in (optimizer, late):
        each.step()
