"""`clip_grad_norm_` of torch's, in a loop that knows nothing of the engine: who reads gradients, and which numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.optim import AdamW

from sp_lightning.pipeline import Pipeline
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from tests.pipeline.optimizer.parts import X, attached, chain, check_story, everything

clip = nn.utils.clip_grad_norm_


def some_then_all(model: nn.Module) -> Tensor:
    return clip(list(model.parameters())[:3], 0.01) + clip(model.parameters(), 0.01)


def refused_and_taken(model: nn.Module) -> Tensor:
    model[2].bias.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(model.parameters(), 0.1, error_if_nonfinite=True)
    model[2].bias.grad[0] = 0  # no NaN may come: it is not equal to itself
    return clip(model.parameters(), 0.1)


def public(model: nn.Module, pipeline: Pipeline | None) -> Tensor:
    return clip(model.parameters(), 0.1) if pipeline is None else pipeline.clip_grad_norm(0.1)


BY_THE_ENGINE: dict[str, Callable[..., Tensor]] = {
    "as in any tutorial": lambda model, _: clip(model.parameters(), 0.1),
    "from transformers and Fabric": lambda model, _: clip(list(model.parameters()), 0.1, 2, error_if_nonfinite=True),
    "imported by name": lambda model, _: imported_by_name(model.parameters(), 1e-3),
    "to a tensor": lambda model, _: clip(model.parameters(), torch.tensor(0.1)),
    "one weight": lambda model, _: clip(model[1].weight, 0.1),
    "twice": lambda model, _: clip(model.parameters(), 1e9) + clip(model.parameters(), 1e9),
    "public": public,
}
BY_TORCH: dict[str, Callable[..., Tensor]] = {
    "another norm": lambda model, _: clip(model.parameters(), 0.1, 1.0),
    "foreach": lambda model, _: clip(model.parameters(), 0.1, foreach=False),
    "some, then all": lambda model, _: some_then_all(model),
    "not finite": lambda model, _: refused_and_taken(model),
    "nothing": lambda model, _: clip([], 0.1),
}


@pytest.mark.parametrize("name", BY_THE_ENGINE | BY_TORCH)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plain_loop_that_clips(name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is read in CPU memory, but where torch has to. From the second step on, norms come from the GPU."""
    read, show = [], Gradient.show
    monkeypatch.setattr(Gradient, "show", lambda self: (self.tensor is not None and read.append(self), show(self))[1])

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer, seen = AdamW(model.parameters(), lr=0.01), []
        for number in range(3):
            for part in range(accumulate):
                (model(X + part + number).square().mean() / accumulate).backward()
            if pipeline is not None and name in BY_THE_ENGINE and number > 0:
                arrived = pipeline.optimizers.clipping._stream.gradient_of.values()
                assert all(gradient.norm is not None for gradient in arrived)
            seen.append((BY_THE_ENGINE | BY_TORCH)[name](model, pipeline))
            optimizer.step()
            optimizer.zero_grad()
        return seen + everything(model, optimizer)

    check_story(story)
    assert bool(read) == (name in BY_TORCH and name != "nothing")


def test_models_that_do_not_stream_are_torchs() -> None:
    """Alone and beside one that streams, and again when that is plain; an optimizer of several models clips all."""

    def numbers(streams: bool) -> list[Tensor]:
        models = chain(), chain().double(), chain()
        both = [*models[0].parameters(), *models[2].parameters()]
        with ExitStack() as stack:
            for model in models[::2] if streams else ():
                stack.enter_context(attached(model))
            for model in models:
                model(X.to(model[0].weight.dtype)).square().mean().backward()
            seen = [clip(models[1].parameters(), 0.1), clip(both, 0.1)]
        seen.append(clip(both, 0.01))
        return seen + [weight.grad for model in models for weight in model.parameters()]

    assert all(map(torch.equal, numbers(False), numbers(True)))
    with pytest.warns(UserWarning, match="empty generator"):
        clip((weight for weight in []), 0.1)
