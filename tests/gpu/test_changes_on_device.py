"""What is added to a module while it is trained, by code that places it on the device, as plain training needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from torch.optim import SGD

from ..zoo.blocks import WIDTH, Block, chain
from .parts import micro_step, on_device

pytestmark = pytest.mark.gpu


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
