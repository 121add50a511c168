"""Saved tensors: handles for weights, the user's own hooks for the rest, and autograd's version check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import top_saved_tensor_hooks
from sp_lightning.pipeline.weights.weight import Twin

from ..parts import place


class Scene:
    """Hooks over one weight of a unit."""

    def __init__(self) -> None:
        self.placed = place([torch.ones(3, 3)])
        self.twin = self.placed.twins[0]
        self.required: list[Twin] = []
        backend, stats = self.placed.backend, Stats()
        meter = Meter(backend, stats)
        self.saved = SavedTensors(meter, Offloader(backend, meter, stats))
        self.saved.twins = self.placed.by_memory
        self.saved.backward = self

    def bring_for_backward(self, twin: Twin) -> None:
        self.required.append(twin)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    assert top_saved_tensor_hooks() is None


class Log:
    """A user's hooks that write down what they see."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.hooks = saved_tensors_hooks(
            lambda tensor: (log.append(f"pack {name}"), tensor)[1],
            lambda tensor: (log.append(f"unpack {name}"), tensor)[1],
        )


def test_the_pair_below_gets_all_but_weights(scene: Scene) -> None:
    """Only the innermost pair is called by autograd: ours must hand on, or a user's checkpoint is switched off."""
    log: list[str] = []
    x = torch.ones(1, 3, requires_grad=True)
    with Log("outer", log).hooks, Log("inner", log).hooks, scene.saved.pushed():
        assert isinstance(scene.saved.pushed(), nullcontext)
        y = (x @ scene.twin.parameter).exp()
    y.sum().backward()
    assert sorted(log) == 2 * ["pack inner"] + 2 * ["unpack inner"]  # x and the result of exp, not the weight
    assert scene.required == [scene.twin]


def test_a_users_pair_above_ours_is_wrapped_again(scene: Scene) -> None:
    """A checkpoint inside of a unit: a nested unit pushes ours once more, over the user's."""
    log: list[str] = []
    x = torch.ones(1, 3, requires_grad=True)
    with scene.saved.pushed(), Log("user", log).hooks, scene.saved.pushed():
        y = (x @ scene.twin.parameter).exp()
    y.sum().backward()
    assert sorted(set(log)) == ["pack user", "unpack user"]
    assert scene.required == [scene.twin]


def test_two_pipelines_hand_on_to_each_other(scene: Scene) -> None:
    """Each finds its own weights, in whatever order their hooks lie."""
    other = Scene()
    x = torch.ones(1, 3, requires_grad=True)
    with scene.saved.pushed(), other.saved.pushed():
        y = x @ scene.twin.parameter @ other.twin.parameter
    y.sum().backward()
    assert scene.required == [scene.twin]
    assert other.required == [other.twin]


@pytest.mark.parametrize("change", ["master", "twin"])
def test_a_weight_changed_in_place_raises(scene: Scene, change: str) -> None:
    """On the host (an optimizer step) as on the device; the weight is named."""
    x = torch.ones(1, 3, requires_grad=True)
    with scene.saved.pushed():
        y = x @ scene.twin.parameter
    with torch.no_grad():
        (scene.placed.weights[0].master if change == "master" else scene.twin.parameter).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*weight 'unit.0'"):
        y.sum().backward()


def test_a_graph_of_an_earlier_arrangement_raises(scene: Scene) -> None:
    """Its weights' places are somebody else's by now."""
    x = torch.ones(1, 3, requires_grad=True)
    with scene.saved.pushed():
        y = x @ scene.twin.parameter
    scene.saved.twins = {}
    with pytest.raises(RuntimeError, match=r"weight 'unit.0' of a graph.*anew"):
        y.sum().backward()
