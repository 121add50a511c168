"""Weights that a forward or a hook keeps from a unit's call, and uses later."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.weights.resting import RestingLeaf
from tests.helpers import Run, assert_same_story, attached, note_state, sgd
from tests.zoo.blocks import WIDTH, Block, Chain, chain


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all linear layers, as a hook on each sees them."""
    kept: list[nn.Parameter] = []
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        layer.register_forward_hook(lambda module, *_: kept.append(module.weight))
    return kept


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 2)])
def test_a_penalty_on_weights_that_hooks_have_collected(k: int, k_prime: int, autocast: bool, activations: str) -> None:
    def story(run: Run) -> None:
        optimizer, kept = sgd(run.model), weights_of(run.model)
        for step in range(3):
            with run.step():
                with torch.autocast("cpu", enabled=autocast, cache_enabled=False):
                    loss = run.model(run.rows(step)).float().square().mean()
                (loss + 0.01 * sum(weight.square().sum() for weight in kept)).backward()
            optimizer.step()
            run.note(f"{step} / loss", loss)
            for number, weight in enumerate(kept):
                run.note(f"{step} / norm {number}", weight.norm())
                run.note(f"{step} / gradient {number}", weight.grad)
            kept.clear()
            note_state(run.trace, str(step), run.model, [optimizer])
            optimizer.zero_grad()

    assert_same_story(story, lambda: chain(4), k=k, k_prime=k_prime, activations=activations)


def test_weights_that_are_kept_for_good() -> None:
    """They are those of the module, whatever happens to its units; nothing more lives on the device for them."""

    def story(run: Run) -> None:
        optimizer, kept = sgd(run.model), weights_of(run.model)
        run.evaluate("before")
        first = kept[:]
        for step in range(3):
            run.normal_step(str(step), optimizer)
            with torch.no_grad():
                first[0].mul_(0.9)
                first[1].data.clamp_(-0.1, 0.1)
            for number, weight in enumerate(first):
                run.note(f"{step} / kept {number}", weight)
            if step == 1:
                run.rebuild()

    assert_same_story(story, lambda: chain(4))
    with attached(model := chain(4)) as pipeline:
        kept = weights_of(model)
        model(Run.rows(0)).sum().backward()
        assert {type(weight) for weight in kept} == {RestingLeaf}
        assert pipeline.stats.promotions == 0


class Renames(nn.Linear):
    """Gives its weight another name, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.alias = self.weight
        return super().forward(x)


def test_another_name_for_a_weight() -> None:
    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for step in range(3):
            run.normal_step(str(step), optimizer)
            run.trace[f"{step} / names"] = [*run.model.state_dict(), *dict(run.model.named_parameters())]

    assert_same_story(story, lambda: Chain([Renames(WIDTH, WIDTH) for _ in range(3)]), units=Renames)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])
def test_copies_of_a_kept_weight_are_ordinary(duplicate: Callable[[Any], nn.Parameter]) -> None:
    with attached(model := chain(3)):
        kept = weights_of(model)
        model(Run.rows(0))
        copied = duplicate(kept[0])
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, next(m.weight for m in model.modules() if isinstance(m, nn.Linear)))
    assert vars(copied) == {}


def test_views_that_outlive_the_forward_are_warned_of() -> None:
    """Nothing else tells; a window that holds all units needs no warning, and a call that keeps none gets none."""
    used: list[Tensor] = []
    with attached(model := chain(4)):
        next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_hook(
            lambda module, *_: used.append(module.weight.detach())
        )
        with pytest.warns(UserWarning, match="somebody still holds a view of weight 'blocks.0.up.weight'"):
            model(Run.rows(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attached(model, k=4):
            model(Run.rows(0)).sum().backward()
        used.clear()
        with attached(chain(4)) as pipeline:
            pipeline.module(Run.rows(0)).sum().backward()


class Tokens(nn.Module):
    """Returns a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens.expand(len(x), -1)


def test_views_that_are_returned_are_no_reason_to_warn() -> None:
    """They are cloned."""
    model = Chain([Tokens(), *chain(3).blocks])
    with warnings.catch_warnings(), attached(model, units=[Tokens, Block], k=1):
        warnings.simplefilter("error")
        model(Run.rows(0)).sum().backward()
