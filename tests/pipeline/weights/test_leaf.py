"""The leaf of a twin: an ordinary Parameter in all that users can tell, but for one count."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.weights.leaf import TwinParameter
from tests.helpers import Run, assert_same_story, attached, sgd
from tests.zoo.blocks import WIDTH, Chain, chain


@pytest.fixture
def leaf() -> TwinParameter:
    return TwinParameter(torch.ones(4, 4))


def test_compiled_code_counts_as_well(leaf: TwinParameter) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def clamped(weight: nn.Parameter) -> Tensor:
        weight.data.clamp_(0, 0.5)
        return weight * 2

    assert clamped(leaf).sum() == 16
    assert leaf._version > 0


class Gained(nn.Linear):
    """Scales with what is written on its weight, as muP does, and writes on it in turn."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "calls"):
            self.weight.calls = 0
        self.weight.calls += 1
        if self.weight.calls == 4:
            del self.weight.calls
        return super().forward(x) * self.weight.gain * getattr(self.weight, "calls", 10)


def gained() -> nn.Module:
    model = Chain([Gained(WIDTH, WIDTH) for _ in range(4)])
    for number, layer in enumerate(model.blocks):
        layer.weight.gain = 1 + 0.1 * number
    return model


@pytest.mark.parametrize("autocast", [False, True])
def test_attributes_of_a_weight_are_those_of_the_master(autocast: bool) -> None:
    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for step in range(6):
            with torch.autocast("cpu", enabled=autocast, cache_enabled=False):
                run.normal_step(str(step), optimizer)
            run.trace[f"{step} / attributes"] = [sorted(vars(layer.weight).items()) for layer in run.model.blocks]
            if step == 2:
                run.rebuild()

    assert_same_story(story, gained, units=Gained)


class Freezes(nn.Linear):
    """Ends or begins its own training, in its forward."""

    calls = 0
    is_frozen_later = True

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.weight.requires_grad_(not self.is_frozen_later)
        return super().forward(x)


@pytest.mark.parametrize("is_frozen_later", [True, False])
def test_a_forward_that_freezes_or_thaws_its_weight(is_frozen_later: bool) -> None:
    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for layer in run.model.blocks[1:3]:
            layer.is_frozen_later = is_frozen_later
            layer.weight.requires_grad_(is_frozen_later)
        for step in range(5):
            run.normal_step(str(step), optimizer)
            run.trace[f"{step} / trained"] = [parameter.requires_grad for parameter in run.model.parameters()]

    assert_same_story(story, lambda: Chain([Freezes(WIDTH, WIDTH) for _ in range(4)]), units=Freezes)


def test_gradients_of_earlier_backwards_can_be_read_in_a_forward() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            gradient = self.weight.grad
            return super().forward(x) * (1 if gradient is None else 1 + gradient.norm())

    def story(run: Run) -> None:
        for step in range(3):
            run.normal_step(str(step), None)

    assert_same_story(story, lambda: Chain([Looks(WIDTH, WIDTH) for _ in range(4)]), units=Looks)


def test_a_gradient_that_is_read_while_it_leaves_is_an_error() -> None:
    """In plain training it would be there; elsewhere in backward, `.grad` is what it is there."""
    with attached(model := chain()):
        model.blocks[1].register_full_backward_hook(lambda block, *_: block.up.weight.grad)
        with pytest.raises(RuntimeError, match=r"'blocks.1.up.weight' is on its way .*`on_after_backward`"):
            model(Run.rows(0)).sum().backward()


def test_a_pickle_of_a_leaf_has_the_attributes_of_the_master() -> None:
    with attached(model := gained(), units=Gained):
        pickles: list[bytes] = []
        model.blocks[0].register_forward_hook(lambda layer, *_: pickles.append(pickle.dumps(layer.weight)))
        model(Run.rows(0))
    loaded = pickle.loads(pickles[0])
    assert type(loaded) is nn.Parameter
    assert vars(loaded) == {"gain": 1.0, "calls": 1}
    assert torch.equal(loaded, model.blocks[0].weight)
