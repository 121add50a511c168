"""Several models, each with its own pipeline: in one step, or by turns, with the numbers of training alone."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial

import pytest
import several_models
import torch

import sp_lightning

from .helpers import Run, attached, same
from .zoo.blocks import chain

SIZES = ["--layers=3", "--hidden=16", "--heads=2", "--batch-size=4", "--steps=5"]
SMALL = [*SIZES, "--lr", "1e-2", "3e-2", "--accelerator=cpu"]


@pytest.mark.parametrize("scopes", [1, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_operations_over_weights_of_two(trained, scopes):
    """A distance of weights (L2-SP, a teacher's), with gradients to both, in a step of both or of the first alone."""
    results = [[], []]
    for seen in results:
        torch.manual_seed(0)
        models = chain(4), chain(4).requires_grad_(trained)
        with ExitStack() as stack:
            pipes = [stack.enter_context(attached(model)) for model in models if seen is results[1]]
            for step in range(3):
                pairs = list(zip(*(model.parameters() for model in models), strict=True))
                with ExitStack() as scope:
                    for pipe in pipes[:scopes]:
                        scope.enter_context(pipe.step())
                    distance = sum((a - b).square().sum() + (b * a).sum() for a, b in pairs)
                    (models[0](Run.rows(step)).square().mean() + distance).backward()
                for a, b in pairs:
                    seen += [a.grad.clone(), b.grad]
                    a.data.sub_(a.grad, alpha=0.1)
                    b.data.mul_(0.9)
                    a.grad = b.grad = None
    assert all(map(same, *results))


def test_the_example(monkeypatch, capsys):
    plain = several_models.alone(several_models.parse([*SMALL, "--strategy=auto"]))
    assert all(losses[-1] < 0.95 * losses[0] for losses in plain)
    assert several_models.main([*SMALL, "--steps=2"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"by_turns: 2 models, 2 steps each, in .* s\nalone: .* s\n", output)
    assert output.endswith("Losses are the same in both orders: True\n")
    monkeypatch.setattr(sp_lightning, "superpipeline", partial(sp_lightning.superpipeline, debug=True))
    assert several_models.by_turns(several_models.parse(SMALL)) == plain
