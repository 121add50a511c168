"""What a module has besides its parameters moves as in `module.to(device)`; the parameters stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.pipeline.units.tree import move_all_but_parameters

from ...zoo.quantized import Int8Linear

META = torch.device("meta")


def moved(*modules: nn.Module) -> nn.Module:
    root = nn.Sequential(*modules)
    move_all_but_parameters(root, META)
    return root


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_buffers() -> None:
    """Those that two modules share, too, and those of scripted ones."""
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    module = moved(first, second, torch.jit.script(nn.BatchNorm1d(4)))
    assert first.running_mean is second.running_mean
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_what_the_root_moves_in_a_to_of_its_own() -> None:
    """A teacher that is no submodule, say, so that its weights are not trained, nor saved."""

    class Distilled(nn.Sequential):
        teacher = (nn.Linear(4, 4),)

        def to(self, *args: Any, **kwargs: Any) -> Distilled:
            self.teacher[0].to(*args, **kwargs)
            return super().to(*args, **kwargs)

    root = Distilled(nn.Linear(4, 4), nn.BatchNorm1d(4))
    move_all_but_parameters(root, META)
    assert root.teacher[0].weight.is_meta
    assert {buffer.device.type for buffer in root.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in root.parameters()} == {"cpu"}
    assert "_apply" not in vars(root)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(4, 3), lambda: nn.LSTM(4, 3), lambda: Int8Linear(nn.Linear(4, 3))],
    ids=["linear", "lstm", "int8"],
)
def test_parameters_and_gradients_stay_the_same(make: Callable[[], nn.Module]) -> None:
    module = make()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    before = [(p, p._version, p.grad, p.grad is not None and p.grad.data_ptr()) for p in module.parameters()]
    flat = getattr(module, "_flat_weights", None)
    moved(module)
    after = [(p, p._version, p.grad, p.grad is not None and p.grad.data_ptr()) for p in module.parameters()]
    assert all(all(x is y or x == y for x, y in zip(*pair, strict=True)) for pair in zip(before, after, strict=True))
    assert getattr(module, "_flat_weights", None) == flat
