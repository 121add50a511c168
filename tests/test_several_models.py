"""Several models, each with its own pipeline: in one step, or by turns, with the numbers of training alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .helpers import Run, attached, same
from .zoo.blocks import chain


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


def train(lr: float, steps: int = 3, **options: Any) -> Iterator[Tensor]:
    """Train a model in a loop that clips, and yield the loss of each step, which is taken when it is asked for."""
    torch.manual_seed(0)
    model = chain(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    with ExitStack() as stack:
        step, clip = nullcontext, nn.utils.clip_grad_norm_
        if options:
            pipe = stack.enter_context(attached(model, **options))
            step, clip = pipe.step, pipe.optimizers.clipping.clip_grad_norm
        for number in range(steps):
            with step():
                loss = model(Run.rows(number)).square().mean()
                loss.backward()
            clip(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()


def test_models_that_take_turns():
    """A sweep in which the host updates one model while another computes has the losses of plain training."""
    rates = [1e-2, 3e-2, 1e-1]
    plain = [list(map(float, train(lr))) for lr in rates]
    by_turns = zip(*[train(lr, k=2, debug=True) for lr in rates], strict=True)
    assert [list(map(float, losses)) for losses in zip(*by_turns, strict=True)] == plain
    assert len({losses[-1] for losses in plain}) == 3
