"""Models that are on the device when training begins, as `load_from_checkpoint` and `.cuda()` leave them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adamax

from sp_lightning import Pipeline, plan, superpipeline

from ..zoo.blocks import WIDTH, Block, chain

pytestmark = pytest.mark.gpu

EXACT = {"lr": 0.125, "momentum": 0.5}  # products with powers of two are exact, so host and device round alike


def on_device(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return chain(4).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, pipeline: Pipeline | None, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        with pipeline.step() if pipeline is not None else nullcontext():
            model(torch.randn(3, WIDTH, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class MakesTensors(Block):
    """It does not say where."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.arange(1, 1 + WIDTH))


@pytest.mark.usefixtures("default_device_was_reset")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_torchs_default_device_may_be_the_device(activations: Any, device: torch.device) -> None:
    """While a model is built, attached and trained; a forward that runs again finds it in autograd's thread, too."""
    torch.set_default_device(device)
    try:
        results = []
        for streamed in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(MakesTensors() for _ in range(4)))
            pipeline = superpipeline(model, device, k=1, activations=activations) if streamed else None
            optimizer = SGD(model.parameters(), **EXACT)
            for _ in range(3):
                model(torch.ones(3, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if pipeline is not None:
                pipeline.detach()
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
        model = on_device(device)
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
    model = on_device(device)
    assert str(plan(model))
    assert {weight.device.type for weight in model.parameters()} == {device.type}
