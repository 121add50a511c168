"""Graphs that are built on masters between steps, whose gradients autograd would add to `.grad` itself."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import collect_until
from tests.helpers import Run, assert_same_story, attached, note_gradients, note_state, sgd
from tests.zoo.blocks import WIDTH, Block, chain


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * sum((weight.square().sum() for weight in model.parameters()), torch.zeros(()))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 2)])
def test_a_penalty_that_is_computed_before_its_step(k: int, k_prime: int, hooked: bool) -> None:
    """What autograd had added to `.grad` after a unit's gradients had left was overwritten by these."""

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        if hooked:
            for weight in run.model.parameters():
                weight.register_hook(lambda gradient: gradient * 0.5)
        for step in range(3):
            early = penalty(run.model)
            with run.step():
                (run.model(run.rows(step)).square().mean() + early).backward()
            note_gradients(run.trace, str(step), dict(run.model.named_parameters()))
            optimizer.step()
            note_state(run.trace, str(step), run.model, [optimizer])
            optimizer.zero_grad()

    assert_same_story(story, lambda: chain(4), k=k, k_prime=k_prime)


def test_a_penalty_with_a_backward_of_its_own() -> None:
    """Gradients are added to those that a step has left, and the next step adds to them."""

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for step in range(3):
            penalty(run.model).backward()
            run.normal_step(f"{step} / first", None, seed=step)
            penalty(run.model).backward()
            note_gradients(run.trace, str(step), dict(run.model.named_parameters()))
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            penalty(run.model).backward()
            optimizer.step()
            note_state(run.trace, str(step), run.model, [optimizer])
            optimizer.zero_grad()

    assert_same_story(story, lambda: chain(4))


def test_units_that_await_such_a_gradient_are_stepped_after_it() -> None:
    """A penalty that was computed after the forward: its gradients arrive first."""

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for step in range(4):
            with run.step():
                loss = run.model(run.rows(step)).square().mean()
            loss = loss + penalty(run.model)
            with nullcontext() if run.pipe is None else run.pipe.optimizers.stepping_in_backward(optimizer):
                loss.backward()
            optimizer.step()
            note_state(run.trace, str(step), run.model, [optimizer])
            optimizer.zero_grad()
        if run.pipe is not None:
            assert run.pipe.stats.steps_in_backward == 0

    assert_same_story(story, lambda: chain(4))


def test_a_gradient_that_comes_after_its_weight_was_stepped() -> None:
    model = chain(4)
    optimizer = sgd(model)
    with attached(model) as pipe:

        def train() -> None:
            early = sum(weight.sum() for weight in model.parameters())  # torch itself looks after what squares save
            with pipe.step():
                loss = model(Run.rows(0)).square().mean() + early
            with pipe.optimizers.stepping_in_backward(optimizer):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        train()  # makes the optimizer's state
        with pytest.raises(RuntimeError, match="after it was stepped in this backward pass"):
            train()


def test_a_weight_that_was_frozen_since() -> None:
    """Autograd adds nothing to the `.grad` of such a parameter."""

    def story(run: Run) -> None:
        run.normal_step("before", None)
        early = penalty(run.model)
        next(iter(run.model.parameters())).requires_grad_(False)
        early.backward()
        note_gradients(run.trace, "after", dict(run.model.named_parameters()))

    assert_same_story(story, lambda: chain(2))


@pytest.mark.parametrize("sparse_in_step", [False, True])
def test_a_sparse_gradient(sparse_in_step: bool) -> None:
    """It is added to what the step brings, be that sparse or not."""

    def embedding_and_blocks() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, WIDTH, sparse=sparse_in_step), Block(), Block())

    def story(run: Run) -> None:
        rows = torch.tensor([1, 5])  # no row twice: those are added up in another order
        weight = run.model.get_parameter("0.weight")
        for step in range(2):
            early = F.embedding(rows, weight, sparse=True).sum()
            with run.step():
                (run.model(rows + step).sum() + early).backward()
            run.note(f"{step} / gradient", weight.grad.to_dense())
            run.model.zero_grad()

    assert_same_story(story, embedding_and_blocks)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_of_the_gradient_is_refused() -> None:
    model = chain(2)
    with attached(model) as pipe:
        with pipe.step():
            model(Run.rows(0)).sum().backward()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            penalty(model).backward(create_graph=True)


def test_nothing_is_held_once_the_engine_is_gone() -> None:
    model = chain(2)
    with attached(model) as pipe, pipe.step():
        model(Run.rows(0)).sum().backward()
    model.zero_grad()
    penalty(model).backward()
    assert all(torch.equal(weight.grad, 0.02 * weight.detach()) for weight in model.parameters())
    gone = weakref.ref(next(iter(model.parameters())))
    del model, pipe
    collect_until(lambda: gone() is None)
    assert gone() is None
