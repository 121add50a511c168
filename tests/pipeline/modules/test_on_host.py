"""Weights that take part in operations on the host, from which they get gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers import Run, assert_same_story, note_gradients, note_state, sgd
from tests.zoo.blocks import chain

Copies = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("copied", [lambda p: p.cpu(), lambda p: p.type(torch.float64)], ids=["cpu", "type"])
def test_a_penalty_on_weights_that_were_copied(copied: Copies, k: int, k_prime: int, autocast: bool) -> None:
    """Autograd added to `.grad` of the masters themselves while the gradients of their units arrived there."""

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        anchors = [parameter.detach().clone() for parameter in run.model.parameters()]
        for step in range(3):
            with run.step():
                with torch.autocast("cpu", enabled=autocast, cache_enabled=False):
                    loss = run.model(run.rows(step)).float().square().mean()
                pairs = zip(run.model.parameters(), anchors, strict=True)
                penalty = sum((copied(weight) - 0.5 * anchor).square().sum() for weight, anchor in pairs)
                asked = torch.autograd.grad(penalty, list(run.model.parameters()), retain_graph=True)
                (loss + 0.01 * penalty).backward()
            for number, gradient in enumerate(asked):
                run.note(f"{step} / asked {number}", gradient)
            note_gradients(run.trace, str(step), dict(run.model.named_parameters()))
            optimizer.step()
            note_state(run.trace, str(step), run.model, [optimizer])
            optimizer.zero_grad()

    assert_same_story(story, lambda: chain(4), k=k, k_prime=k_prime)


def test_a_penalty_on_the_host_does_not_bring_weights_to_the_device() -> None:
    def story(run: Run) -> None:
        for step in range(2):
            with run.step():
                loss = run.model(run.rows(step)).square().mean()
                (loss + sum(weight.cpu().square().sum() for weight in run.model.parameters())).backward()
        if run.pipe is not None:
            assert run.pipe.stats.promotions == run.pipe.stats.resident_loads == 0

    assert_same_story(story, lambda: chain(4), k=2)


def test_a_leaf_that_somebody_has_kept_stays_at_rest() -> None:
    """Its memory holds another unit's weights, so it still stands for its master."""

    def story(run: Run) -> None:
        kept: list[Tensor] = []
        first = next(module for module in run.model.modules() if isinstance(module, torch.nn.Linear))
        first.register_forward_hook(lambda module, *_: kept.append(module.weight))
        with run.step():
            loss = run.model(run.rows(0)).square().mean()
            copied = sum(weight.cpu().sum() for weight in run.model.parameters())
            run.note("kept", kept[0] * 2)
            (loss + copied).backward()

    assert_same_story(story, lambda: chain(4), k=1)
