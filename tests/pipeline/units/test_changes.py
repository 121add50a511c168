"""Noticing, as a step begins, that a module tree has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

from sp_lightning import superpipeline


def tree() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    parametrizations.weight_norm(layers[2][1])
    return layers.append(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "append": lambda layers: layers[2].append(nn.Linear(2, 2)),
    "remove": lambda layers: layers[2].pop(0),
    "replace": lambda layers: layers[2].__setitem__(0, nn.Linear(2, 2)),
    "child of a leaf": lambda layers: setattr(layers[1], "inner", nn.Linear(2, 2)),
    "parameter": lambda layers: setattr(layers[1], "scale", nn.Parameter(torch.ones(2))),
    "parametrize": lambda layers: parametrizations.spectral_norm(layers[0]),
    "unparametrize": lambda layers: remove_parametrizations(layers[2][1], "weight"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_tree_is_arranged_anew(change: Callable[[nn.Sequential], object]) -> None:
    """Whatever comes, goes or moves; but not steps, states, modes, buffers and hooks."""
    layers = tree()

    def arrangements_of_a_step() -> int:
        before = pipeline.stats.arrangements
        with pipeline.step():
            layers(torch.ones(1, 2)).sum().backward()
        return pipeline.stats.arrangements - before

    with superpipeline(layers, "cpu", k=2) as pipeline:
        for _ in range(3):
            arrangements_of_a_step()
        layers.load_state_dict(layers.state_dict())
        layers.eval()
        layers[0].register_buffer("seen", torch.zeros(1))
        layers[0].register_forward_hook(lambda *_: None)
        assert arrangements_of_a_step() == 0
        change(layers)
        assert arrangements_of_a_step() > 0
        assert arrangements_of_a_step() == 0


CONVERSIONS: dict[str, Callable[[nn.Linear], object]] = {
    "shape": lambda layer: setattr(layer.weight, "data", layer.weight.data[:1].repeat(5, 1)),
    "dtype": lambda layer: setattr(layer.weight, "data", layer.weight.data.double()),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_weight_that_is_converted_while_it_has_a_gradient(convert: Callable[[nn.Linear], object]) -> None:
    """As transformers resizes embeddings: the gradient stays as it was until it is zeroed."""
    found = []
    for streamed in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        with superpipeline(layers, "cpu", k=1) if streamed else nullcontext():
            layers(torch.ones(1, 3)).sum().backward()
            convert(layers[1])
            found.append([layers[1].weight.detach().clone(), layers[1].weight.grad, layers[0].weight.grad])
            layers.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
