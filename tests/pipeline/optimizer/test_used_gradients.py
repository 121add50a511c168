"""Gradients that a step has used: kept as long as the engine can, and never missed in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sp_lightning.pipeline import Pipeline, engine

from .parts import Own, X, attached, chain, check_story, everything, stepped_early

Loop = Callable[[nn.Module], list[Any]]


def backward(model: nn.Module, skipped: int = 0) -> None:
    """The loss of all layers but one."""
    x = X
    for number, layer in enumerate(model):
        if number != skipped - 1:
            x = layer(x).tanh()
    x.square().mean().backward()


def two_optimizers(model: nn.Module) -> list[Any]:
    optimizers = [SGD(model.parameters(), lr=0.1), Adam(model[1:3].parameters(), lr=0.1)]
    for _ in range(3):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return everything(model, *optimizers)


def twice(model: nn.Module) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


def zeroed_to_zeros(model: nn.Module, zero: Callable[[nn.Module, Optimizer], Any], cls: type[Optimizer] = AdamW) -> Any:
    """What a step does not use has gradients of zeros: it decays, and moves on by its momentum."""
    optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.5)  # type: ignore[call-arg]
    total = []
    for step in range(6):
        zero(model, optimizer)
        backward(model, skipped=step % 4)
        total.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return [*total, *everything(model, optimizer)]


def unread(model: nn.Module) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(6):
        backward(model, skipped=step % 4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return everything(model, optimizer)


def in_one_buffer(model: nn.Module) -> list[Any]:
    """Gradients are views of a buffer that is cleared, and measured, as a whole."""
    flat, optimizer = torch.zeros(sum(p.numel() for p in model.parameters())), SGD(model.parameters(), lr=0.1)
    begin, norms = 0, []
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    for _ in range(4):
        flat.zero_()
        backward(model)
        norms.append(flat.norm())
        optimizer.step()
    return [*norms, *everything(model)]


def of_the_last_batch(model: nn.Module) -> list[Any]:
    """The step precedes the backward."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
    return everything(model, optimizer)


def left_by_another_loss(model: nn.Module) -> list[Any]:
    """As in a GAN: the last layers get gradients of the first one's loss, which are zeroed before they are used."""
    first, last = AdamW(model[:2].parameters(), lr=0.1), AdamW(model[2:].parameters(), lr=0.1)
    for _ in range(4):
        last.zero_grad()
        model[2:](X).square().mean().backward()
        last.step()
        backward(model)
        first.step()
        first.zero_grad()
    return everything(model, first, last)


def zeroed_by_hand(model: nn.Module, after_forward: bool) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        loss = model(X).square().mean() if after_forward else None
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        (model(X).square().mean() if loss is None else loss).backward()
        optimizer.step()
    return everything(model, optimizer)


def never_zeroed(model: nn.Module) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        backward(model)
        optimizer.step()
    return [*everything(model, optimizer), *[p.grad for p in model.parameters()]]


LOOPS: dict[str, Loop] = {
    "never zeroed": never_zeroed,
    "two optimizers": two_optimizers,
    "twice": twice,
    "zeros of an optimizer": lambda model: zeroed_to_zeros(model, lambda _, o: o.zero_grad(set_to_none=False)),
    "zeros of a module": lambda model: zeroed_to_zeros(model, lambda m, _: m.zero_grad(set_to_none=False)),
    "zeros for the optimizer's own code": lambda model: zeroed_to_zeros(
        model, lambda m, _: m.zero_grad(set_to_none=False), type("OwnSGD", (SGD,), {})
    ),
    "zeros that nobody reads": unread,
    "in one buffer": in_one_buffer,
    "of the last batch": of_the_last_batch,
    "left by another loss": left_by_another_loss,
    "zeroed by hand": lambda model: zeroed_by_hand(model, after_forward=False),
    "zeroed by hand after the forward": lambda model: zeroed_by_hand(model, after_forward=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_leave_gradients(name: str) -> None:
    check_story(lambda model, _: LOOPS[name](model))


def clip(model: nn.Module, pipeline: Pipeline, _: Optimizer) -> None:
    pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.1)


def read_one(model: nn.Module, pipeline: Pipeline, optimizer: Optimizer) -> None:
    """As a logger, a scheduler or a progress bar of a user's own may do."""
    assert model[0].weight.grad is not None


USES: dict[str, Callable[[nn.Module, Pipeline, Optimizer], Any]] = {
    "read": read_one,
    "step": lambda model, _, optimizer: optimizer.step(),
    "the step of another": lambda model, *_: Own(model.parameters(), lr=0.1).step(),
    "clip": clip,
    "torch's clipping": lambda model, *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_gradient_that_is_used_again_is_an_error(use: str, adds: bool) -> None:
    """It is gone, and plain training would use it, or add to it. After `zero_grad` all is well."""
    with attached(model := chain()) as pipeline:
        optimizer = SGD(model.parameters(), lr=0.1)
        stepped_early(pipeline, model, optimizer)
        optimizer.step()
        if adds:
            backward(model)
        for _ in range(2):  # reading it does not make it another one
            with pytest.raises(RuntimeError, match="'0.weight' was used in an optimizer's step.*`zero_grad"):
                USES[use](model, pipeline, optimizer)
        optimizer.zero_grad()
        backward(model)
        USES[use](model, pipeline, optimizer)


def test_clipping_what_was_used_in_backward_is_an_error() -> None:
    with attached(model := chain()) as pipeline:
        optimizer = Adam(model.parameters(), lr=0.1)
        stepped_early(pipeline, model, optimizer)
        with pytest.raises(RuntimeError, match="'0.weight' was already used in backward.*`overlap_optimizer=False`"):
            clip(model, pipeline, optimizer)
        optimizer.step()


def test_gradients_of_a_step_that_nobody_zeroed_go_as_weights_get_other_places() -> None:
    """They would have to be copied."""
    with attached(model := chain()) as pipeline:
        optimizer = SGD(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        model(X)
        assert all(isinstance(gradient.tensor, Tensor) for gradient in pipeline._engine.stream.gradient_of.values())
        pipeline._engine.place_weights()
        assert all(gradient.tensor is None for gradient in pipeline._engine.stream.gradient_of.values())
        with pytest.raises(RuntimeError, match="'0.weight' was used in an optimizer's step"):
            read_one(model, pipeline, optimizer)


@pytest.mark.parametrize("has_room", [True, False])
def test_gradients_of_the_last_step_stay_as_the_module_is_detached(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward of the user's own then adds to them, as in plain training; to none if RAM has no room for them."""
    monkeypatch.setattr(engine, "has_room_for", lambda nbytes: has_room)

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer = SGD(model.parameters(), lr=0.1)
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if pipeline is not None:
            pipeline.detach()
        elif not has_room:
            optimizer.zero_grad()
        backward(model)
        return [parameter.grad for parameter in model.parameters()]

    check_story(story)
