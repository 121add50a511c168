"""The facts that exactness stands on, one by one: each story is told by a plain module and by an attached one."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sp_lightning.pipeline.activations import offload

from .helpers import Run, assert_same_story, attached, bombs, fail, note_state, sgd, torchs_defaults
from .zoo.blocks import WIDTH, Block, Chain, chain


@pytest.mark.usefixtures("default_device_was_reset")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_torchs_defaults_change_nothing(dtype: torch.dtype, device: str, mixed: bool, activations: Any) -> None:
    """While a model is attached, and in its steps, whether its weights are of the default dtype or under autocast."""

    def build() -> nn.Module:
        with torch.device("cpu"):
            model = chain(4)
            model.scale = nn.Parameter(torch.rand(400, 400), requires_grad=False)  # fp16 cannot count its elements
            return model.float() if mixed else model

    def story(run: Run) -> None:
        optimizer, x = sgd(run.model), torch.ones(3, WIDTH, dtype=run.model.scale.dtype, device="cpu")
        for step in range(3):
            with run.step():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    output = run.model(run.model(x))
                (output.square().mean() * run.model.scale.square().mean()).backward()
            optimizer.step()
            run.model.scale.data.mul_(0.5)  # past its version
            optimizer.zero_grad()
            note_state(run.trace, f"step {step}", run.model, [optimizer])

    with torchs_defaults(dtype, device):
        assert_same_story(story, build, activations=activations)


class Interrupted(SGD):
    """Something happens in the middle of its step."""

    happens: Callable[[], None]

    def step(self, closure: Any = None) -> None:
        self.happens()
        super().step(closure)


@pytest.mark.parametrize("where", ["forward", "between", "backward", "step", "scope"])
def test_a_thread_that_evaluates_while_another_one_trains(where: str) -> None:
    """It is refused, and nothing changes, unless they take turns."""

    def story(run: Run) -> None:
        def evaluate() -> None:
            try:
                with torch.no_grad():
                    run.model(run.rows(9))
            except RuntimeError as error:
                refused.append(str(error))

        def happens(here: str, *_: Any) -> None:
            if run.pipe is not None and here == where and current_thread() is main_thread():
                thread = Thread(target=evaluate)
                thread.start()
                thread.join()

        refused: list[str] = []
        optimizer = Interrupted(run.model.parameters(), lr=0.1)
        optimizer.happens = partial(happens, "step")
        run.model.blocks[1].register_forward_pre_hook(partial(happens, "forward"))
        for number in range(3):
            x = run.rows(number).requires_grad_()
            x.register_hook(partial(happens, "backward"))
            loss = run.model(x).square().mean()
            happens("between")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with run.step():
                happens("scope")
            note_state(run.trace, f"{number}", run.model, [optimizer])
        expected = 0 if run.pipe is None or where == "between" else 3
        assert len([text for text in refused if "while another thread computes with it" in text]) == expected
        assert len(refused) == expected

    assert_same_story(story, partial(chain, 3))


# ----------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("first", [True, False], ids=["in-the-first-step", "in-a-later-step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_exception_is_right(where: str, error: type[BaseException], first: bool, k: int) -> None:
    """An exception in the middle of a step leaves the pipeline ready (accelerate and FSDP2 needed a reset for this)."""

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        if not first:
            run.normal_step("before", optimizer)
        fail(run, error, where)
        run.normal_step("after", optimizer, seed=1)
        fail(run, error, where)
        fail(run, error, where)
        run.evaluate("evaluation")
        run.normal_step("after three failures", optimizer, seed=2)
        if run.pipe is not None:
            assert run.pipe.stats.resets >= 3

    assert_same_story(story, bombs, k=k)


@pytest.mark.parametrize("activations", ["auto", "offload"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_that_the_user_catches_inside_of_a_step(
    where: str, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step that skips a bad batch and goes on with the next one."""
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 1)

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        bomb = run.model.blocks[2]
        run.normal_step("before", optimizer)
        with run.step():
            bomb.error, bomb.where = ValueError, where
            with pytest.raises(ValueError, match="on purpose"):
                run.model(run.rows(1)).square().mean().backward()
            bomb.error = None
            run.model.zero_grad()
            loss = run.model(run.rows(2)).square().mean()
            loss.backward()
        run.note("loss", loss)
        run.normal_step("accumulated on top", optimizer, seed=3)
        run.normal_step("after", optimizer, seed=4)

    assert_same_story(story, bombs, activations=activations)


# ----------------------------------------------------------------------------------- edits between forward and backward


EDITS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "write": torch.no_grad()(lambda model, _: model.blocks[2].up.weight.mul_(2)),
    "step": lambda _, optimizer: optimizer.step(),
    "load": lambda model, _: model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("k", [1, 2])
def test_weights_changed_between_forward_and_backward_raise(edit: Callable[..., object], k: int) -> None:
    """Saved-tensor hooks turn autograd's version check off; a backward over other weights must raise all the same."""

    def edited_step(run: Run, optimizer: Optimizer) -> None:
        loss = run.model(run.rows(1)).square().mean()
        loss.backward(retain_graph=True)
        edit(run.model, optimizer)
        loss.backward()

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        run.normal_step("before", optimizer)
        with pytest.raises(RuntimeError, match="(?i)modified by an in-?place operation"), run.step():
            edited_step(run, optimizer)
        optimizer.zero_grad()
        run.normal_step("after", optimizer, seed=2)

    assert_same_story(story, partial(chain, 4), k=k)


class EditsActivation(Block):
    """Changes the result of tanh, which tanh's own backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        out = x + self.down(hidden)
        hidden.add_(1)
        return out


class EditsWeight(Block):
    """Changes a weight that it has computed with."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.down.weight.add_(1)
        return out


class KeepsHidden(Chain):
    """Hands its activations to the caller."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = []
        for block in self.blocks:
            x = block(x)
            self.hidden.append(x)
        return x


@pytest.mark.parametrize(
    ("activations", "debug"), [("keep", True), ("keep", False), ("offload", True)], ids=["counted", "kept", "offloaded"]
)
@pytest.mark.parametrize("where", ["inside a unit", "a weight", "while the next unit runs", "after the forward"])
def test_what_is_changed_in_place_raises(
    where: str, activations: str, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks that hand an activation through must keep autograd's version check alive, and do so for weights."""
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 1)
    kind = {"inside a unit": EditsActivation, "a weight": EditsWeight}.get(where, Block)

    def edited_step(run: Run) -> None:
        if where == "while the next unit runs":
            run.model.blocks[2].register_forward_pre_hook(lambda *_: (run.model.hidden[0].add_(1), None)[1])
        loss = run.model(run.rows(1)).square().mean()
        if where == "after the forward":
            run.model.hidden[1].add_(1)
        loss.backward()

    def story(run: Run) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), run.step():
            edited_step(run)

    assert_same_story(story, lambda: KeepsHidden([Block(), kind(), Block()]), activations=activations, debug=debug)


def test_gradients_that_the_user_keeps_are_not_overwritten() -> None:
    """A gradient kept across zero_grad(set_to_none=True) is the user's; the next one is another tensor."""

    def story(run: Run) -> None:
        optimizer, kept = sgd(run.model), {}
        for step in range(3):
            run.normal_step(f"step {step}", None, seed=step)
            for name, parameter in run.model.named_parameters():
                kept[f"step {step} / {name}"] = parameter.grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for label, gradient in kept.items():
            run.note(f"kept / {label}", gradient)

    assert_same_story(story, partial(chain, 4))


# ----------------------------------------------------------------------------------------------- copies and checkpoints


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"sp_lightning" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickle_roundtrip(model: nn.Module, protocol: int = 5) -> nn.Module:
    written = pickle.dumps(model, protocol)
    assert b"sp_lightning" not in written, "it can be read without this package"
    return pickle.loads(written)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, pickle_roundtrip, partial(pickle_roundtrip, protocol=2), save_and_load]
)
def test_a_copy_of_an_attached_module_is_plain(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """Copies have plain classes and weights of their own, and train like any module."""

    def story(run: Run) -> None:
        run.normal_step("before", sgd(run.model))
        clone = duplicate(run.model)
        part = duplicate(run.model.blocks[1])
        assert {type(module) for module in (*clone.modules(), *part.modules())} == plain_types
        assert {type(parameter) for parameter in (*clone.parameters(), *part.parameters())} == {nn.Parameter}
        Run(clone, run.trace).normal_step("the copy", sgd(clone))
        run.note("a part", part(run.rows(3)))
        run.normal_step("the original", sgd(run.model), seed=1)

    plain_types = {type(module) for module in chain(4).modules()}
    assert_same_story(story, partial(chain, 4))


ONE_ELEMENT: list[Callable[[Tensor], None]] = [
    lambda weight: weight.data[7, 3].fill_(0.5),
    lambda weight: weight.detach().numpy()[7].fill(0.5),
    torch.no_grad()(lambda weight: weight[7, 3].fill_(0.5)),  # torch counts this one
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("edit", ONE_ELEMENT)
@pytest.mark.parametrize("k", [2, 4])
def test_weights_edited_between_steps_are_seen(edit: Callable[[Tensor], None], k: int, autocast: bool) -> None:
    """What stayed on the device must not be used when the host weights have other values now."""

    def story(run: Run) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            tell(run)

    def tell(run: Run) -> None:
        run.normal_step("before", optimizer := sgd(run.model))
        run.evaluate("own weights")
        edit(run.model.blocks[0].up.weight)
        run.evaluate("edited weights")
        run.normal_step("after", optimizer, seed=2)

    assert_same_story(story, partial(chain, 4), k=k)


SURGERY: dict[str, Callable[[nn.Linear], Any]] = {
    "a Parameter": lambda layer: nn.Parameter(layer.weight),
    "a frozen one": lambda layer: nn.Parameter(layer.weight, requires_grad=False),
    "an embedding": lambda layer: nn.Embedding.from_pretrained(layer.weight).weight,
    "a parametrization": lambda layer: parametrizations.weight_norm(layer).parametrizations.weight.original1,
}


@pytest.mark.parametrize("name", SURGERY)
def test_parameters_made_of_weights_between_steps_are_plain(name: str) -> None:
    def story(run: Run) -> None:
        run.normal_step("before", optimizer := sgd(run.model))
        made = SURGERY[name](run.model.blocks[0].up)
        assert type(made) is nn.Parameter
        run.note("made", made)
        run.normal_step("after", optimizer)
        run.note("of what was stepped", made)

    assert_same_story(story, partial(chain, 4))


class CallsNext(Block):
    """Calls the next block within its own call, past the module tree."""

    following: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.following is None else x + self.following(x)


@pytest.mark.parametrize("k", [1, 2])
def test_calls_of_more_units_inside_of_each_other_than_have_places(k: int) -> None:
    def build() -> nn.Module:
        blocks = [CallsNext() for _ in range(4)]
        for block, following in itertools.pairwise(blocks):
            object.__setattr__(block, "following", following)
        model = Chain(blocks)
        model.forward = lambda x: blocks[0](x)
        return model

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for number in range(3):
            run.normal_step(f"step {number}", optimizer, seed=number)

    assert_same_story(story, build, k=k)


# ------------------------------------------------------------------------------------------------- scopes and lifetimes


def test_nothing_keeps_a_detached_pipeline_alive() -> None:
    """No global hook, thread or module holds on to the engine or to its slots."""
    model, hooks = chain(4), (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [*map(len, hooks)]
    with attached(model) as pipe:
        run = Run(model, pipe=pipe)
        run.normal_step("a step", sgd(model))
        reference = weakref.ref(pipe)
    del pipe, run
    gc.collect()
    assert reference() is None
    assert [*map(len, hooks)] == before
