"""Several models, each with its own pipeline: in one step, or by turns, with the numbers of training alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
from itertools import chain as flat
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, SGD, Adafactor, AdamW, Optimizer

from sp_lightning import SuperpipelineStrategy, fabric, optim, superpipeline
from sp_lightning.pipeline import Pipeline

from .helpers import Run, Trace, assert_same_trace, attached, frozen, note_state, same
from .lightning_modules import Base, assert_same_training, fit
from .zoo.blocks import WIDTH, chain


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


# --------------------------------------------------------------------------- optimizers over several models, and parts


class Leaning(SGD):
    """A user's own, whose step of each weight depends on the gradients of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        total = sum(weight.grad.sum() for weight in weights)
        for weight in weights:
            weight -= 0.05 * weight.grad + 1e-3 * total


def hooked(weights: Any) -> Optimizer:
    optimizer = AdamW(weights, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


BY_UNIT: dict[str, Callable[[Any], Optimizer]] = {
    "adamw, foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw, fused": partial(AdamW, lr=1e-2, fused=True),
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "momentum, fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "adafactor": partial(Adafactor, lr=1e-2),
    "ours": partial(optim.AdamW, lr=1e-2),
    "ours, int8": partial(optim.AdamW, lr=1e-2, moments="int8"),
}
BY_OWN_CODE: dict[str, Callable[[Any], Optimizer]] = {
    "asgd": partial(ASGD, lr=0.05),
    "hooked": hooked,
    "user's own": Leaning,
}
KINDS = BY_UNIT | BY_OWN_CODE


def weights_of(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list(flat.from_iterable(model.parameters() for model in models))


def by_kind(models: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Param groups of matrices and of vectors, each of weights of all models; the first one is empty."""
    weights = weights_of(models)
    vectors = [weight for weight in weights if weight.dim() == 1]
    matrices = [weight for weight in weights if weight.dim() == 2]
    return [{"params": []}, {"params": vectors}, {"params": matrices, "weight_decay": 0.1}]


SHAPES: dict[str, Callable[[Sequence[nn.Module]], list[Any]]] = {
    "2 to 1": lambda models: [weights_of(models[:2])],
    "3 to 1": lambda models: [by_kind(models)],
    "1 to 2": lambda models: [[group] for group in by_kind(models[:1])[1:]],
    "3 to 2": lambda models: [[group] for group in by_kind(reversed(models))[1:]],
    "3 to 3": lambda models: [weights_of([model]) for model in models],
}
"""What each optimizer steps, of three models, the last of which does not stream."""


class Together:
    """Models in a row that are trained together, and what was seen of that; streamed if asked."""

    def __init__(self, streams: bool, *options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.models = [chain(2), chain(2), chain(1)]
        self.free = nn.Parameter(torch.ones(WIDTH))  # a weight of no model
        self.options = options if streams else ()
        self.pipes: dict[int, Pipeline] = {}
        self.ends = ExitStack()
        self.trace = Trace()

    def attach(self, number: int) -> None:
        if number < len(self.options):
            self.pipes[number] = self.ends.enter_context(attached(self.models[number], **self.options[number]))

    def detach(self, number: int) -> None:
        if number in self.pipes:
            self.pipes.pop(number).detach()

    def backward(self, number: int, models: int = 3) -> Tensor:
        with ExitStack() as scopes:
            for pipe in self.pipes.values() if number % 2 else ():
                scopes.enter_context(pipe.step())
            rows = self.free * Run.rows(number)
            loss = reduce(lambda x, model: model(x), self.models[:models], rows).square().mean()
            loss.backward()
        self.trace[f"{len(self.trace)} / loss {number}"] = frozen(loss)
        return loss

    def note(self, label: str, *optimizers: Optimizer) -> None:
        note_state(self.trace, label, nn.ModuleList(self.models), list(optimizers))
        self.trace[f"{label} / free"] = frozen(self.free)


STREAMED = {"k": 2}, {"k": 1, "activations": "recompute"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_over_several_models(kind: str, shape: str) -> None:
    """Each weight is stepped once, by the optimizer that has it."""

    def train(streams: bool) -> Trace:
        together = Together(streams, *STREAMED)
        with together.ends:
            for number in (1, 0):
                together.attach(number)
            optimizers = [KINDS[kind](weights) for weights in SHAPES[shape](together.models)]
            for number in range(3):
                together.backward(number, models=int(shape[0]))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                together.note(f"{number}", *optimizers)
            for number, pipe in together.pipes.items():
                steps = pipe.stats.overlapped_steps
                assert (steps > 0) == (kind in BY_UNIT and number < int(shape[0])), "a feature did not run"
        return together.trace

    assert_same_trace(train(False), train(True))


def attached_again(together: Together, optimizer: Optimizer, number: int) -> None:
    """The model that was attached first is plain for a step, and then the last of all."""
    if number == 2:
        together.detach(0)
    if number == 3:
        together.attach(0)
    plain_step(together, optimizer, number)


def attached_later(together: Together, optimizer: Optimizer, number: int) -> None:
    """A model whose weights the optimizer has stepped before."""
    if number == 0:
        together.detach(1)
    if number == 2:
        together.attach(1)
    plain_step(together, optimizer, number)


def with_a_new_group(together: Together, optimizer: Optimizer, number: int) -> None:
    if number == 1:
        optimizer.add_param_group({"params": [together.free], "lr": 0.1})
    if number == 2:
        optimizer.add_param_group({"params": list(together.models[2].parameters())})
    plain_step(together, optimizer, number)


def with_a_closure(together: Together, optimizer: Optimizer, number: int) -> None:
    optimizer.step(partial(together.backward, number))
    optimizer.zero_grad()


def clipped(together: Together, optimizer: Optimizer, number: int) -> None:
    together.backward(number)
    weights = weights_of(together.models)
    together.trace[f"{number} / norm"] = frozen(nn.utils.clip_grad_norm_(weights, 0.1))
    optimizer.step()
    optimizer.zero_grad()


def in_backward(together: Together, optimizer: Optimizer, number: int) -> None:
    with ExitStack() as scopes:
        for pipe in together.pipes.values():
            scopes.enter_context(pipe.optimizers.stepping_in_backward(optimizer))
        together.backward(number)
    assert number == 0 or all(pipe.stats.steps_in_backward for pipe in together.pipes.values())
    optimizer.step()
    optimizer.zero_grad()


def failing(together: Together, optimizer: Optimizer, number: int) -> None:
    """A step that raises changes no weight, and the next one is right."""
    together.backward(number)
    weights = optimizer.param_groups[0]["params"]
    if number == 1:
        weights.insert(0, nn.Parameter(torch.ones(2)))
        weights[0].grad = torch.ones(2).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        del weights[0]
    else:
        optimizer.step()
    optimizer.zero_grad()


def plain_step(together: Together, optimizer: Optimizer, number: int) -> None:
    together.backward(number)
    optimizer.step()
    optimizer.zero_grad()


STEPS = [attached_again, attached_later, with_a_new_group, with_a_closure, clipped, in_backward, failing]


@pytest.mark.parametrize("step", STEPS)
def test_steps_over_several_models(step: Callable[[Together, Optimizer, int], None]) -> None:
    """What else happens to an optimizer over two models that stream."""

    def train(streams: bool) -> Trace:
        together = Together(streams, *STREAMED)
        with together.ends:
            for number in (0, 1):
                together.attach(number)
            optimizer = AdamW(weights_of(together.models[:2]), lr=1e-2)
            for number in range(5):
                step(together, optimizer, number)
                together.note(f"{number}", optimizer)
        return together.trace

    assert_same_trace(train(False), train(True))


def test_a_line_search_over_several_models() -> None:
    """LBFGS evaluates both models several times in a step."""

    def train(streams: bool) -> Trace:
        together = Together(streams, *STREAMED)
        with together.ends:
            for number in (0, 1):
                together.attach(number)
            optimizer = LBFGS(weights_of(together.models[:2]), lr=0.1, max_iter=3)

            def closure() -> Tensor:
                optimizer.zero_grad()
                return together.backward(1)

            for _ in range(2):
                optimizer.step(closure)
            together.note("end")
        return together.trace

    assert_same_trace(train(False), train(True))


@pytest.mark.parametrize("kind", ["adamw, fused", "sgd", "ours", "user's own"])
def test_one_optimizer_over_several_models_under_fabric(kind: str) -> None:
    """Clipped in every second step, with accumulation, and a second optimizer over one of the models' vectors."""

    def train(strategy: Any) -> Trace:
        torch.manual_seed(0)
        trace, built = Trace(), [chain(2), chain(3)]
        runs = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        models = [runs.setup_module(model) for model in built]
        groups = by_kind(built[:1])
        groups[2]["params"] += weights_of(built[1:])
        optimizers = [KINDS[kind](groups[2]["params"]), SGD(groups[1]["params"], lr=0.1)]
        stepped = runs.setup_optimizers(*optimizers)
        for number in range(4):
            for more in range(2):
                rows = Run.rows(2 * number + more)
                loss = reduce(lambda x, model: model(x), models, rows).square().mean()
                runs.backward(loss)
                trace[f"{number} / loss {more}"] = frozen(loss)
            if number % 2:
                trace[f"{number} / norm"] = frozen(runs.clip_gradients(models[0], stepped[0], max_norm=0.1))
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
            note_state(trace, f"{number}", nn.ModuleList(built), optimizers)
        runs.strategy.teardown()
        return trace

    assert_same_trace(train(SingleDeviceStrategy("cpu")), train(fabric.SuperpipelineStrategy(k=2, debug=True)))


class Pair(Base):
    """Trains a second model with its own optimizer, whose gradients both models get."""

    def __init__(self, kind: str) -> None:
        super().__init__(blocks=2)
        self.kind = kind
        self.others = [Base(blocks=2).blocks]  # a list: no part of this module

    def forward(self, x: Tensor) -> Tensor:
        for block in self.others[0]:
            x = block(x)
        return super().forward(x)

    def configure_optimizers(self) -> Optimizer:
        return KINDS[self.kind]([*self.parameters(), *self.others[0].parameters()])


def fit_pair(trainer: L.Trainer, module: Pair) -> list[Tensor]:
    with ExitStack() as ends:
        if isinstance(trainer.strategy, SuperpipelineStrategy):
            ends.callback(superpipeline(module.others[0], "cpu", k=1).detach)
        fit(trainer, module)
    return list(module.others[0].state_dict().values())


def with_a_scaler() -> dict[str, Any]:
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=3.0))}


ARGUMENTS: list[Callable[[], dict[str, Any]]] = [dict, lambda: {"gradient_clip_val": 0.1}, with_a_scaler]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "clipped", "scaled"])
@pytest.mark.parametrize("kind", ["momentum", "ours"])
def test_a_second_model_in_the_optimizer_of_a_trainer(kind: str, arguments: Callable[[], dict[str, Any]]) -> None:
    """The Trainer's own model is stepped in backward, the second one at `step()`."""
    assert_same_training(partial(Pair, kind), fit_pair, arguments)
