"""Random stories: whatever users do to a model between steps, in whatever order, all is as it is in a plain loop."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import note, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.utils.hooks import RemovableHandle

from sp_lightning import optim, superpipeline
from sp_lightning.pipeline.options import ActivationPolicy

from .drawing import random_programs
from .helpers import Run, assert_same_story, note_gradients, note_state
from .planning.parts import Wanders
from .random_graphs import DTYPE_IN_FORWARD, SHAPE, Tree, forest, trees, units_are_leaves, units_are_nodes


@dataclass
class Now:
    """Where a story has come to; an action's number chooses among what there is."""

    run: Run
    optimizer: Optimizer = field(init=False)
    actions: int = 0
    saved: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    teachers: list[nn.Module] = field(default_factory=list)
    after: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        new_optimizer(self, 0)

    @property
    def model(self) -> nn.Module:
        return self.run.model

    @property
    def parts(self) -> nn.ModuleList:
        return self.model.parts

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def parameter(self, number: int) -> nn.Parameter:
        return chosen(list(self.model.parameters()), number)

    def module(self, number: int) -> nn.Module:
        return chosen([module for module in self.model.modules() if [*module.parameters(recurse=False)]], number)

    def teacher(self, is_trained: bool) -> nn.Module:
        """A second model that is attached, to whose weights ours are drawn; a copy of what ours was at first."""
        if not self.teachers:
            self.teachers.append(copy.deepcopy(self.model).requires_grad_(is_trained))
            if self.run.pipe is not None:
                self.after.callback(superpipeline(self.teachers[0], "cpu", k=1).detach)
            if is_trained:
                self.optimizer.add_param_group({"params": list(self.teachers[0].parameters())})
        return self.teachers[0]

    def linear(self, number: int) -> nn.Linear:
        return chosen([module for module in self.model.modules() if isinstance(module, nn.Linear)], number)

    def backward(self, loss: Tensor) -> None:
        self.note("loss", loss)
        if loss.requires_grad:
            loss.backward()

    def note(self, what: str, value: Tensor) -> None:
        self.run.note(f"{self.actions} / {what} {len(self.run.trace)}", value)

    def note_all(self) -> None:
        note_state(self.run.trace, str(self.actions), self.model, [self.optimizer])
        note_gradients(self.run.trace, str(self.actions), self.parameters)
        for teacher in self.teachers:
            note_gradients(self.run.trace, f"{self.actions} / teacher", dict(teacher.named_parameters()))
            for weight in teacher.parameters():
                self.note("weight of a teacher", weight)


def chosen(among: list[Any], number: int) -> Any:
    return among[number % len(among)]


# --------------------------------------------------------------------------------------------------------------- losses


def output(now: Now, number: int) -> Tensor:
    return now.model(now.run.rows(number)).square().mean()


def penalty(now: Now, number: int) -> Tensor:
    return output(now, number) + 0.01 * now.parameter(number).square().sum()


def two_forwards(now: Now, number: int) -> Tensor:
    return output(now, number) + output(now, number + 1)


def distillation(now: Now, number: int) -> Tensor:
    with torch.no_grad():
        target = now.model(now.run.rows(number + 1))
    return (now.model(now.run.rows(number)) - target).square().mean()


def validation_in_between(now: Now, number: int) -> Tensor:
    loss = output(now, number)
    now.model.eval()
    with torch.no_grad():
        now.note("validated", output(now, number + 1))
    now.model.train()
    return loss


def one_part(now: Now, number: int) -> Tensor:
    return chosen([*now.parts], number)(now.run.rows(number)).square().mean()


def gradients_asked_for(now: Now, number: int) -> Tensor:
    loss = output(now, number)
    weights = [weight for weight in now.model.parameters() if weight.requires_grad]
    if loss.requires_grad and weights:
        gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        for gradient in gradients:
            if gradient is not None:
                now.note("gradient", gradient)
    return loss


def half_frozen(now: Now, number: int) -> Tensor:
    weights = [weight for weight in now.model.parameters() if weight.requires_grad][::2]
    for weight in weights:
        weight.requires_grad_(False)
    now.backward(output(now, number))
    for weight in weights:
        weight.requires_grad_()
    return output(now, number + 1)


def towards_a_teacher(now: Now, number: int) -> Tensor:
    teacher = dict(now.teacher(is_trained=number % 2 == 1).named_parameters())
    weights = {name: weight for name, weight in now.model.named_parameters() if name in teacher}
    return output(now, number) + sum((weight - teacher[name]).square().sum() for name, weight in weights.items())


LOSSES = [
    output, towards_a_teacher, penalty, two_forwards, distillation, validation_in_between,
    one_part, gradients_asked_for, half_frozen,
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- steps


def forward_and_backward(now: Now, number: int) -> None:
    with now.run.step():
        now.backward(chosen(LOSSES, number)(now, number))


def backward_after_the_step(now: Now, number: int) -> None:
    with now.run.step():
        loss = chosen(LOSSES, number)(now, number)
    now.backward(loss)


def two_calls_in_no_scope(now: Now, number: int) -> None:
    now.backward(two_forwards(now, number))


def optimizer_step(now: Now, number: int) -> None:
    if number % 3 == 1:
        now.note("norm", clip_grad_norm_(now.model.parameters(), 0.1))
    now.optimizer.step()
    now.optimizer.zero_grad()


def whole_steps(now: Now, number: int) -> None:
    for more in range(3):
        forward_and_backward(now, len(LOSSES) * more)
        optimizer_step(now, number)


def closure(now: Now, number: int) -> None:
    def step() -> Tensor:
        now.optimizer.zero_grad()
        with now.run.step():
            loss = output(now, number)
            now.backward(loss)
        return loss

    now.optimizer.step(step)
    now.optimizer.zero_grad()  # a step consumes gradients


def failing_step(now: Now, number: int) -> None:
    """Of an optimizer that meets a gradient, before all others, which most refuse; or whose closure fails."""
    extra = nn.Parameter(torch.ones(2))
    extra.grad = torch.ones(2).to_sparse()
    weights = now.optimizer.param_groups[0]["params"]
    weights.insert(0, extra)
    with suppress(RuntimeError, ZeroDivisionError):
        now.optimizer.step((lambda: number / 0) if number % 2 else None)
    assert weights.pop(0) is extra
    now.optimizer.state.pop(extra, None)
    now.optimizer.zero_grad()


def everything_in_one_scope(now: Now, number: int) -> None:
    with now.run.step():
        for more in range(2):
            now.backward(output(now, number + more))
            optimizer_step(now, number)


def evaluation(now: Now, number: int) -> None:
    now.model.eval()
    with torch.no_grad() if number % 2 else torch.inference_mode(), now.run.step():
        now.note("evaluated", output(now, number))
    now.model.train()


def interrupted_forward(now: Now, number: int) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    part = chosen([*now.parts], number)
    hook = part.register_forward_hook(interrupt) if number % 2 else part.register_forward_pre_hook(interrupt)
    try:
        with now.run.step():
            now.model(now.run.rows(number))
    except KeyboardInterrupt:
        pass
    hook.remove()


STEPS = [
    forward_and_backward, backward_after_the_step, two_calls_in_no_scope, optimizer_step,
    whole_steps, closure, failing_step, everything_in_one_scope, evaluation,
    interrupted_forward,
]  # fmt: skip


# -------------------------------------------------------------------------------------------------------- between steps


def freeze_or_unfreeze(now: Now, number: int) -> None:
    now.module(number // 2).requires_grad_(bool(number % 2))


def write(now: Now, number: int) -> None:
    weight = now.parameter(number // 4)
    if number % 4 == 0:
        with torch.no_grad():
            weight.mul_(0.9)
    elif number % 4 == 1:
        weight.data.clamp_(-0.1, 0.1)
    elif number % 4 == 2:
        weight.data = weight.data * 0.9
    else:
        nn.init.normal_(weight, std=0.1)


def write_all(now: Now, number: int) -> None:
    with torch.no_grad():
        vector = parameters_to_vector(now.model.parameters()) * 0.99
    now.note("vector", vector)
    vector_to_parameters(vector, now.model.parameters())


def save(now: Now, number: int) -> None:
    file = io.BytesIO()
    torch.save({"model": now.model.state_dict(), "optimizer": now.optimizer.state_dict()}, file)
    file.seek(0)
    now.saved = torch.load(file)
    for tensor in now.saved["model"].values():
        now.note("saved", tensor)


def load(now: Now, number: int) -> None:
    if now.saved.get("model", {}).keys() == now.model.state_dict().keys():
        now.model.load_state_dict(now.saved["model"])


def load_optimizer(now: Now, number: int) -> None:
    state = now.saved.get("optimizer")
    sizes = [len(group["params"]) for group in now.optimizer.param_groups]
    if state and [len(group["params"]) for group in state["param_groups"]] == sizes:
        now.optimizer.load_state_dict(state)


def assign(now: Now, number: int) -> None:
    state = {name: tensor.clone() for name, tensor in now.model.state_dict().items()}
    now.model.load_state_dict(state, assign=True)
    new_optimizer(now, number)


def new_optimizer(now: Now, number: int) -> None:
    """One over both models, if there are two."""
    now.model.zero_grad()
    models = [now.model, *now.teachers]
    now.optimizer = chosen(OPTIMIZERS, number)([weight for model in models for weight in model.parameters()])


OPTIMIZERS: list[Callable[[list[nn.Parameter]], Optimizer]] = [
    partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    partial(AdamW, lr=0.01, weight_decay=0.1),
    partial(RMSprop, lr=0.002, momentum=0.5),
    partial(optim.AdamW, lr=0.01, weight_decay=0.1, moments="int8"),
    partial(optim.Adam, lr=0.01),
]


def change_hyperparameters(now: Now, number: int) -> None:
    now.optimizer.param_groups[0].update(lr=0.001 * (number % 7), weight_decay=0.01 * (number % 2))


def change_gradients(now: Now, number: int) -> None:
    weight = now.parameter(number // 5)
    if number % 5 == 0:
        clip_grad_value_(now.model.parameters(), 0.05)
    elif weight.grad is not None and number % 5 == 1:
        weight.grad.mul_(0.5)
    elif weight.grad is not None:
        weight.grad = None if number % 5 == 3 else weight.grad * 0.3


def hook_a_weight(now: Now, number: int) -> None:
    weight = now.parameter(number)
    if weight.requires_grad:
        now.hooks.append(weight.register_hook(lambda gradient: gradient * 1.1))


def hook_a_module(now: Now, number: int) -> None:
    now.hooks.append(chosen([*now.parts], number).register_forward_hook(lambda module, inputs, output: output * 1.01))


def remove_a_hook(now: Now, number: int) -> None:
    if now.hooks:
        now.hooks.pop(number % len(now.hooks)).remove()


def average(now: Now, number: int) -> None:
    if now.averages.keys() != now.parameters.keys():
        now.averages = {name: weight.detach().clone() for name, weight in now.parameters.items()}
    for name, weight in now.parameters.items():
        if now.averages[name].shape == weight.shape:
            now.averages[name].lerp_(weight.data if number % 2 else weight.detach(), 0.1)


def evaluate_averages(now: Now, number: int) -> None:
    weights = now.parameters
    if now.averages.keys() != weights.keys():
        return
    kept = {name: weight.detach().clone() for name, weight in weights.items()}
    for values in (now.averages, kept):
        for name, weight in weights.items():
            if number % 2:
                weight.data = values[name].clone()
            else:
                weight.data.copy_(values[name])
        evaluation(now, number)


def copy_and_train(now: Now, number: int) -> None:
    twin = copy.deepcopy(now.model) if number % 2 or now.hooks else pickle.loads(pickle.dumps(now.model))
    loss = twin(now.run.rows(number)).square().mean()
    now.backward(loss)
    for weight in twin.parameters():
        if weight.grad is not None:
            now.note("gradient of a copy", weight.grad)


def look(now: Now, number: int) -> None:
    now.note_all()


def read_in_a_fork(now: Now, number: int) -> None:
    """A forked process gets the right value, or an error that says where it is."""
    weight = now.parameter(number)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = repr(float(weight.detach().sum()))
        except RuntimeError as error:
            answer = str(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if now.run.pipe is None or "fork" not in answer:
        assert answer == repr(float(weight.detach().sum()))  # NaN may be right


def prune_or_not(now: Now, number: int) -> None:
    layer = now.linear(number)
    if "weight_orig" in layer._parameters:
        prune.remove(layer, "weight")
    elif "weight" in layer._parameters:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    new_optimizer(now, number)


CHANGES = [
    freeze_or_unfreeze, write, write_all, save, load, load_optimizer, assign, new_optimizer,
    change_hyperparameters, change_gradients, hook_a_weight, hook_a_module, remove_a_hook,
    average, evaluate_averages, copy_and_train, look, read_in_a_fork, prune_or_not,
]  # fmt: skip

ACTION = st.one_of(st.sampled_from(STEPS), st.sampled_from(CHANGES))


@random_programs(
    20,
    of=3,
    drawn=st.lists(trees(), min_size=1, max_size=3),
    actions=st.lists(st.tuples(ACTION, st.integers(0, 999)), min_size=3, max_size=20),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    units=st.sampled_from([None, units_are_leaves, units_are_nodes]),
    activations=st.sampled_from(get_args(ActivationPolicy)),
    overlap_optimizer=st.sampled_from(["auto", False]),
    wanders=st.none() | st.integers(0, 999),
    shape=SHAPE,
    dtype_in_forward=DTYPE_IN_FORWARD,
)
def test_random_stories(
    drawn: list[Tree],
    actions: list[tuple[Callable[[Now, int], None], int]],
    window: tuple[int, int],
    units: Any,
    activations: ActivationPolicy,
    overlap_optimizer: Any,
    wanders: int | None,
    shape: str | None,
    dtype_in_forward: torch.dtype | None,
) -> None:
    """No order of actions changes a number."""
    note(", ".join(f"{action.__name__} {number}" for action, number in actions))

    def story(run: Run) -> None:
        now = Now(run)
        try:
            for action, number in [(whole_steps, 0), *actions]:
                now.actions += 1
                torch.manual_seed(number)
                action(now, number)
        except (RuntimeError, ValueError, KeyError):
            if run.pipe is None:
                reject()  # plain training raises, too
            raise
        finally:
            now.after.close()
        now.note_all()

    k, k_prime = max(window), min(window)
    options = {"units": units, "activations": activations, "overlap_optimizer": overlap_optimizer}
    planner = None if wanders is None else Wanders(wanders)
    windows = {"k": k, "k_prime": k_prime, "planner": planner}
    assert_same_story(story, lambda: forest(drawn, shape, dtype_in_forward), **windows, **options)
