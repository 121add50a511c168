"""Modules whose parts are on the device: what lives there, weights that begin there, and what is added in training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Adamax, Optimizer
from torchmetrics import MeanMetric

from sp_lightning import Pipeline, plan, superpipeline

from ..zoo.blocks import WIDTH, Block, chain
from .parts import micro_step, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")]


# --------------------------------------------------------------- what lives there, as after `module.to(device)`


class Anchored(nn.Module):
    """Computes with anchors that are no buffer, and moves them itself, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.anchors = torch.ones(4)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> nn.Module:  # type: ignore[override]
        super()._apply(fn, *args)
        self.anchors = fn(self.anchors)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.anchors


class Measured(nn.Module):
    """Notes its mean in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach())
        return self.layer(x)


@pytest.mark.parametrize(
    "make", [Anchored, Measured, lambda: torch.jit.script(nn.BatchNorm1d(4))], ids=["own", "metric", "scripted"]
)
def test_it_is_where_forward_needs_it(make: Callable[[], nn.Module], device: torch.device) -> None:
    results = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
        x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        if streamed:
            with on_device(model, device, k=1, units=nn.Linear):
                model(x).square().sum().backward()
            assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        else:
            model.to(device)(x).square().sum().backward()
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(*results)


# ----------------------------------------- weights that begin there, as `load_from_checkpoint` and `.cuda()` leave them


EXACT = {"lr": 0.125, "momentum": 0.5}  # products with powers of two are exact, so host and device round alike


def train(model: nn.Module, optimizer: Optimizer, pipeline: Pipeline | None, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        with pipeline.step() if pipeline is not None else nullcontext():
            model(torch.randn(3, WIDTH, generator=generator, device="cpu").to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class MakesTensors(Block):
    """It does not say where."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.arange(1, 1 + WIDTH))


@pytest.mark.usefixtures("default_device_was_reset")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_torchs_default_device_may_be_the_device(activations: Any, device: torch.device) -> None:
    """While a model is built, attached and trained; a forward that runs again in backward finds it, too."""
    torch.set_default_device(device)
    try:
        results = []
        for streamed in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(MakesTensors() for _ in range(4)))
            with superpipeline(model, device, k=1, activations=activations) if streamed else nullcontext():
                train(model, SGD(model.parameters(), **EXACT), None, device)
            results.append(host_values(model))
        assert all(map(torch.equal, *results))
    finally:
        torch.set_default_device(None)


def host_values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("kind", [SGD, Adamax])
def test_they_are_taken_over_in_the_middle_of_training(kind: Any, device: torch.device) -> None:
    """With the gradients that they have by then, and with their optimizer's state."""
    results = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = chain(4).to(device)
        optimizer = SGD(model.parameters(), **EXACT) if kind is SGD else kind(model.parameters(), foreach=False)
        train(model, optimizer, None, device)
        model(torch.ones(3, WIDTH, device=device)).sum().backward()
        with superpipeline(model, device, k=2) if streamed else nullcontext() as pipeline:
            if pipeline is not None:
                assert {weight.device.type for weight in model.parameters()} == {"cpu"}
                assert {weight.grad.device.type for weight in model.parameters() if weight.grad is not None} == {"cpu"}
            train(model, optimizer, pipeline, device)
        results.append(host_values(model))
    for plain, ours in zip(*results, strict=True):
        if kind is SGD:
            assert torch.equal(plain, ours)
        else:  # the same formula, rounded by another kernel
            torch.testing.assert_close(plain, ours)


def test_they_can_be_planned_for(device: torch.device) -> None:
    """A plan does not move them."""
    model = chain(4).to(device)
    assert str(plan(model))
    assert {weight.device.type for weight in model.parameters()} == {device.type}


# ------------------------------------------------------------------------ what is added by code that places it there


def rows(device: torch.device) -> Tensor:
    return torch.ones(3, WIDTH, device=device)


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_modules_that_are_added_stream(where: str, device: torch.device) -> None:
    """Wherever they are built, and although they have gradients already. On the device, that raised an error later."""
    model = chain(3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with on_device(model, device) as pipe:
        micro_step(pipe, rows(device))
        optimizer.step()
        optimizer.zero_grad()
        added = Block().to(device if where == "device" else where)
        added.up.weight.grad = torch.ones_like(added.up.weight)
        model.blocks.append(added)
        optimizer.add_param_group({"params": list(added.parameters())})
        weight = added.up.weight
        micro_step(pipe, rows(device))
        assert {weight.device.type, weight.grad.device.type} == {"cpu"}
        assert weight.grad.max() > 0.9, "the gradient that was there is part of the sum"
        optimizer.step()
        optimizer.zero_grad()
        micro_step(pipe, rows(device))
        optimizer.step()
        assert any(each.master is weight for each in pipe.arrangement.weights)
        assert optimizer.state[weight]["momentum_buffer"].device.type == "cpu"


def test_modules_that_are_added_on_the_device_are_given_back_on_the_host(device: torch.device) -> None:
    """As all others."""
    model = chain(3)
    with on_device(model, device) as pipe:
        micro_step(pipe, rows(device))
        model.blocks.append(Block().to(device))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_buffers_that_validation_meets_first_can_be_trained_with(device: torch.device) -> None:
    """They go to the device in inference mode, from which autograd saves no tensors."""
    model = chain(3)
    with on_device(model, device) as pipe:
        micro_step(pipe, rows(device))
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.3)
        with torch.inference_mode(), pipe.step():
            model(rows(device))
        assert model.blocks[0].up.weight_mask.device == device
        micro_step(pipe, rows(device))
