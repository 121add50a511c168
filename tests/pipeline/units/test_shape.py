"""Noticing that a module tree has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

from sp_lightning.pipeline.units.tree import Shape


def tree() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    parametrizations.weight_norm(layers[2][1])
    return layers


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "append": lambda layers: layers[2].append(nn.Linear(2, 2)),
    "remove": lambda layers: layers[2].pop(0),
    "replace": lambda layers: layers[2].__setitem__(0, nn.Linear(2, 2)),
    "child of a leaf": lambda layers: setattr(layers[1], "inner", nn.Linear(2, 2)),
    "parameter": lambda layers: setattr(layers[1], "scale", nn.Parameter(torch.ones(2))),
    "parametrize": lambda layers: parametrizations.spectral_norm(layers[0]),
    "unparametrize": lambda layers: remove_parametrizations(layers[2][1], "weight"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(change: Callable[[nn.Sequential], object]) -> None:
    """Whatever comes, goes or moves."""
    layers = tree()
    shape = Shape(layers)
    assert not shape.has_changed()
    change(layers)
    assert shape.has_changed()
    assert not Shape(layers).has_changed()


def test_what_happens_in_training_is_no_change() -> None:
    """Steps, states, modes, devices, buffers and hooks; a scripted module makes its children anew for whoever looks."""
    layers = tree().append(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    shape = Shape(layers)
    layers(torch.ones(1, 2)).sum().backward()
    layers.load_state_dict(layers.state_dict())
    layers.eval().double().requires_grad_(False)
    layers[0].register_buffer("seen", torch.zeros(1))
    layers[0].register_forward_hook(lambda *_: None)
    assert not shape.has_changed()
