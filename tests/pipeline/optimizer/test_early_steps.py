"""Units stepped while backward runs: the numbers of plain training, and an error where they would be others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from sp_lightning.pipeline import Pipeline, Stats

from ...helpers import PATIENCE
from .parts import (
    WIDTH,
    Own,
    X,
    adam,
    attached,
    by_kind,
    chain,
    check_story,
    everything,
    momentum,
    plain_step,
    stepped_early,
)


def stepping(optimizer: Optimizer, pipeline: Pipeline | None, **options: Any) -> AbstractContextManager[Any]:
    return nullcontext() if pipeline is None else pipeline.optimizers.stepping_in_backward(optimizer, **options)


def train_in_backward(
    model: nn.Module,
    optimizer: Optimizer,
    pipeline: Pipeline | None,
    steps: int = 3,
    loss_of: Callable[[nn.Module], Tensor] = lambda model: model(X).square().mean(),
    before: Callable[[nn.Module], Any] = lambda model: None,
    first: int = 1,
    **options: Any,
) -> list[Any]:
    """Steps under backward where there is a pipeline; those before `first` after it, as a new optimizer's first one."""
    for number in range(steps + 1):
        optimizer.zero_grad()
        before(model)
        loss = loss_of(model)
        with stepping(optimizer, pipeline if number >= first else None, **options):
            loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()] + everything(model, optimizer)[len([*model.parameters()]) :]


def check_in_backward(
    make_optimizer: Callable[[nn.Module], Optimizer],
    training: dict[str, Any] | None = None,
    make: Callable[[], nn.Module] = chain,
    **options: Any,
) -> Stats:
    """Training by steps in backward is as plain training."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        return train_in_backward(model, make_optimizer(model), pipeline, **(training or {}))

    return check_story(story, make, **options)


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize(("k", "k_prime"), [(2, 1), (1, 1), (4, 2), (5, 5)])
def test_units_are_stepped_while_backward_runs(k: int, k_prime: int, make: Callable[[nn.Module], Optimizer]) -> None:
    """Joined neighbors when all are complete; the numbers, gradients included, are those of plain training."""
    stats, units = check_in_backward(make, k=k, k_prime=k_prime), math.ceil(5 / k_prime)
    assert stats.steps_in_backward == 3 * units
    assert stats.overlapped_steps == 4 * units


class Partly(nn.Module):
    """A layer that leaves out its bias when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.whole = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.whole else None)


def partly(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Partly() for _ in range(count)])


def leave_out(model: nn.Module) -> None:
    model[1].whole = model[3].whole = False


def checkpointed(model: nn.Module, reentrant: bool) -> Tensor:
    x = model[0](X)
    x = checkpoint(lambda x: model[2](model[1](x).sin()), x, use_reentrant=reentrant)
    x = checkpoint(lambda x: checkpoint(model[3], x.cos(), use_reentrant=reentrant), x, use_reentrant=reentrant)
    return model[4](x).square().mean()


kept_graphs: list[Tensor] = []


def keep_a_graph(model: nn.Module) -> None:
    """Somebody holds a loss whose backward may still come."""
    kept_graphs[:] = [model[2:4](X)]


@pytest.fixture(autouse=True)
def _no_graph_is_kept() -> Iterator[None]:
    yield
    kept_graphs.clear()


CONDITIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "incomplete": (3 * 3, {"before": leave_out}),
    "another graph needs weights": (3 * 4, {"before": keep_a_graph}),
    "reentrant checkpoints": (3 * 2, {"loss_of": lambda model: checkpointed(model, True)}),
    "checkpoints": (3 * 5, {"loss_of": lambda model: checkpointed(model, False)}),
    "used twice": (3 * 5, {"loss_of": lambda model: model(model(X)).square().mean()}),
}


@pytest.mark.parametrize("k_prime", [1, 2])
@pytest.mark.parametrize("why", CONDITIONS)
def test_units_that_cannot_be_stepped_in_backward_are_stepped_after_it(why: str, k_prime: int) -> None:
    """Gradients that are not whole, or weights that some node still needs; the numbers are the same."""
    steps, options = CONDITIONS[why]
    stats = check_in_backward(adam, options, partly, units=Partly, k=4, k_prime=k_prime)
    assert stats.steps_in_backward == steps or (k_prime > 1 and stats.steps_in_backward < steps)


class KeepsView(torch.autograd.Function):
    """Is given something that has the weight, and keeps a view of it past the hooks for saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, has_weight: Any, weight_in: Callable[[Any], Tensor]) -> Tensor:
        ctx.view = weight_in(has_weight)[:]
        return x @ ctx.view.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.view, None, None


HIDING: dict[str, tuple[Callable[[nn.Linear], Any], Callable[[Any], Tensor]]] = {
    "module": (lambda layer: layer, lambda layer: layer.weight),
    "list of views": (lambda layer: [layer.weight.t()], lambda views: views[0].t()),
    "tuple of detached": (lambda layer: (layer.weight.detach(),), lambda views: views[0]),
}


@pytest.mark.parametrize("how", HIDING)
def test_a_function_that_has_a_weight_reads_it_as_it_was(how: str) -> None:
    """The weight's gradient comes before the Function's backward: the unit is stepped when backward has left it."""
    give, weight_in = HIDING[how]

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(KeepsView.apply(x, give(self), weight_in)).tanh()

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(5)])

    assert check_in_backward(momentum, make=make).steps_in_backward == 3 * 5


@pytest.mark.timeout(2 * PATIENCE)  # landing buffers that are not given back would be waited for, for ever
@pytest.mark.parametrize("count", [5, 16])
@pytest.mark.parametrize("why", ["incomplete", "another graph needs weights"])
def test_lower_gradients_that_were_not_stepped_in_backward_are_kept(why: str, count: int) -> None:
    """They came to pass through; some units of their group did not complete, or are still needed."""

    def before(model: nn.Module) -> None:
        for layer in model[1::2]:
            layer.whole = why != "incomplete"
        if why != "incomplete":
            kept_graphs[:] = [model(X)]

    def weights(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer = adam(model)
        for number in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if number > 1:  # first steps show what is lowered, and a graph that is kept would hinder that
                    before(model)
                loss = model(X).square().mean()
            with stepping(optimizer, pipeline if number > 1 else None):
                loss.backward()
            optimizer.step()
        kept_graphs.clear()
        assert pipeline is None or pipeline.summary().lowered > 0
        return [p.detach().clone() for p in model.parameters()]

    check_story(weights, lambda: partly(count), units=Partly, k=4, k_prime=2)


@pytest.mark.parametrize("retained", [True, False])
def test_a_gradient_after_the_step_is_an_error(retained: bool) -> None:
    """The weight has taken its step: what was vouched for is not so, and that is told, and what to do."""
    with attached(model := chain()) as pipeline:
        optimizer = adam(model)
        plain_step(model, optimizer)
        optimizer.zero_grad()
        loss = model(X).square().mean()
        with pipeline.optimizers.stepping_in_backward(optimizer):
            loss.backward(retain_graph=retained)
            late = loss if retained else model(X).sum()
            with pytest.raises(RuntimeError, match=r"got another gradient after.*`overlap_optimizer=False`"):
                late.backward()


@pytest.mark.parametrize("why", ["accumulated", "another optimizer's", "unknown", "switched off", "frozen"])
def test_units_that_are_not_stepped_in_backward(why: str) -> None:
    """Numbers are right all the same."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        parameters = [*model.parameters()]
        if why == "frozen":
            model[2].weight.requires_grad_(False)
        if why == "another optimizer's":
            other = SGD(parameters[5:6], lr=0.1)
            parameters = parameters[:5] + parameters[6:]
        optimizer = (Own if why == "unknown" else Adam)(parameters, lr=0.01)
        for number in range(4):
            model.zero_grad()
            if why == "accumulated":
                model[1:](X).sum().backward()
            loss = model(X).square().mean()
            with stepping(optimizer, pipeline if number else None):
                loss.backward()
            optimizer.step()
            if why == "another optimizer's":
                other.step()
        return everything(model)

    options = {"overlap_optimizer": False} if why == "switched off" else {}
    steps = {"accumulated": 15, "another optimizer's": 12, "unknown": 0, "switched off": 0}
    assert check_story(story, **options).steps_in_backward == steps.get(why, 15)


def test_param_groups_are_stepped_in_backward_by_their_own_settings() -> None:
    """Also where both have weights of one unit."""
    assert check_in_backward(by_kind).steps_in_backward == 3 * 5


@pytest.mark.parametrize("inside", [True, False], ids=["in-a-step", "bare"])
def test_an_exception_while_stepping_in_backward_warns(inside: bool) -> None:
    """Some weights have taken the step, others have not: nobody can undo that, so it is said."""

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    with attached(model := chain()) as pipeline:
        optimizer = adam(model)
        plain_step(model, optimizer)
        optimizer.zero_grad()
        x = model[:2](X)
        x.register_hook(fail)
        loss = model[2:](x).square().mean()
        scope = pipeline.step() if inside else nullcontext()

        def story() -> None:
            with pytest.raises(KeyboardInterrupt), scope, pipeline.optimizers.stepping_in_backward(optimizer):
                loss.backward()
            optimizer.zero_grad()
            with pipeline.step():
                model(X)

        with pytest.warns(UserWarning, match=r"\d weights have taken this step, \d have not"):
            story()
        assert len(optimizer.param_groups[0]["params"]) == 10
        optimizer.zero_grad()
        plain_step(model, optimizer)


LOOKS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "read": lambda model, _: model[3].weight.grad,
    "scale": lambda model, _: model[3].weight.grad.mul_(0.1),
    "set": lambda model, _: setattr(model[3].weight, "grad", torch.zeros(WIDTH, WIDTH)),
    "delete": lambda model, _: setattr(model[3].weight, "grad", None),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "fill with zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("when", ["at once", "when all is done"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_reading_gradients_before_the_step_is_an_error(look: Callable[..., Any], when: str) -> None:
    """It would have no effect, and nobody would notice."""
    with attached(model := chain()) as pipeline:
        optimizer = adam(model)
        stepped_early(pipeline, model, optimizer)
        if when == "when all is done":
            pipeline._engine.settle()
        with pytest.raises(RuntimeError, match=r"gradient of weight '\d.\w+' was already used in backward"):
            look(model, optimizer)
        optimizer.step()
        with pytest.raises(RuntimeError, match="gradient of weight '3.weight' was used in an optimizer's step"):
            _ = model[3].weight.grad
        plain_step(model, optimizer)


READS: dict[str, Callable[[nn.Module], Any]] = {
    "a weight": lambda model: model[3].weight.norm(),
    "an alias": lambda model: model[3].weight.detach(),
    "data": lambda model: model[3].weight.data,
    "a call": lambda model: model[3](X),
    "a leaf that is kept": lambda model: model.kept.norm(),
}


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_weights_that_backward_has_stepped_is_an_error(read: Callable[[nn.Module], Any], k: int) -> None:
    """They are another step's by then, and their place on the device may have another unit's bytes."""
    with attached(model := chain(), k=k) as pipeline:
        optimizer = adam(model)
        plain_step(model, optimizer)
        optimizer.zero_grad()
        model[3].register_forward_pre_hook(lambda *_: model.__dict__.update(kept=model[3].weight))
        first = model[0](X)
        first.register_hook(lambda gradient: read(model))
        loss = model[1:](first).square().mean()
        wrong = r"Weight '3.weight' is used in backward after the optimizer has updated it.*overlap_optimizer=False"
        with pytest.raises(RuntimeError, match=wrong), pipeline.optimizers.stepping_in_backward(optimizer):
            loss.backward()


def test_a_unit_whose_weight_has_an_alias_is_stepped_after_backward() -> None:
    """Somebody may read it in backward."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer, found = adam(model), []
        for number in range(3):
            optimizer.zero_grad()
            with nullcontext() if pipeline is None else pipeline.step():
                alias = model[3].weight.detach()
                first = model[0](X)
                first.register_hook(lambda gradient, alias=alias: found.append(alias.norm()))
                loss = model[1:](first).square().mean()
            with stepping(optimizer, pipeline if number else None):
                loss.backward()
            optimizer.step()
        return [*found, *everything(model, optimizer)]

    assert check_story(story, chain).steps_in_backward == 2 * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
        lambda optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.5)),
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda optimizer: optimizer.param_groups[0]["lr"].mul_(2),
        lambda optimizer: optimizer.param_groups[0]["betas"].reverse(),
    ],
    ids=["learning rate", "betas", "another group", "a tensor", "in a list"],
)
def test_settings_that_change_before_the_step(change: Callable[[Optimizer], Any]) -> None:
    """Units would have been stepped with others than the rest."""
    with attached(model := chain()) as pipeline:
        optimizer = Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        stepped_early(pipeline, model, optimizer)
        change(optimizer)
        with pytest.raises(RuntimeError, match="updated units in backward, but now its param groups were changed"):
            optimizer.step()


def test_another_optimizer_of_the_same_weights() -> None:
    with attached(model := chain()) as pipeline:
        optimizer, other = adam(model), momentum(model)
        stepped_early(pipeline, model, optimizer)
        with pytest.raises(RuntimeError, match="Adam has updated units .* now SGD is about to update some"):
            other.step()
        optimizer.step()


def test_two_optimizers_that_step_when_both_have_had_their_backward() -> None:
    """The step of one does not make the other forget what it has stepped."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizers = [Adam(model[:2].parameters(), lr=0.01), Adam(model[2:].parameters(), lr=0.1)]
        for number in range(3):
            model.zero_grad()
            for optimizer, part in zip(optimizers, (model[:2], model[2:]), strict=True):
                loss = part(X).square().mean()
                with stepping(optimizer, pipeline if number else None):
                    loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return everything(model, *optimizers)

    assert check_story(story).steps_in_backward == 2 * 2


def test_state_that_is_forgotten_is_made_anew() -> None:
    """In backward, and in the order in which torch makes it."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer = adam(model)
        before = train_in_backward(model, optimizer, pipeline)
        assert [id(weight) for weight in optimizer.state] == [id(weight) for weight in model.parameters()]
        optimizer.state.clear()
        after = train_in_backward(model, optimizer, pipeline, first=0)
        return before + after

    assert check_story(story).steps_in_backward == (3 + 4) * 5
