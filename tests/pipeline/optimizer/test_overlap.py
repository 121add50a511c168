"""Optimizer steps that overlap with computing: what is stepped when, and that nobody sees an unfinished step."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, Optimizer

from sp_lightning.pipeline import Pipeline
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.pipeline.optimizer import unit_steps
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, BY_WEIGHT, HAVE_FUSED_KERNELS
from tests.helpers import torchs_defaults

from ...helpers import PATIENCE
from .parts import WIDTH, Own, X, adam, attached, autocast_step, chain, check_story, everything, plain_step

Step = Callable[[nn.Module, Optimizer], Any]


@contextmanager
def held_up(pipeline: Pipeline | None) -> Iterator[threading.Event]:
    """Work on the host does not begin before the event is set, or whatever needs it would wait for a minute."""
    gate = threading.Event()
    if pipeline is not None:
        pipeline.backend.drain()  # what an earlier step left behind would be held up, too, and a step needs it
        pipeline.backend._host.submit(Job(lambda: (gate.wait(PATIENCE), None)[1]))  # type: ignore[attr-defined]
    try:
        yield gate
    finally:
        gate.set()


def nothing_is_stepped(pipeline: Pipeline) -> bool:
    under_way = (unit.update.ticket for unit in pipeline.arrangement.in_window)
    return all(step is None or step.done for step in under_way)


def open_soon(gate: threading.Event) -> None:
    threading.Timer(0.03, gate.set).start()


# ------------------------------------------------------------------------------------------------------------ exactness


SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "nesterov": True}, "AdamW": {"amsgrad": True}}


@pytest.mark.parametrize(
    ("alone", "lowered", "clips"), [(WIDTH, True, True), (1 << 16, False, False), (1 << 16, True, True)]
)
@pytest.mark.parametrize(
    ("cls", "flags"),
    [*((cls, {}) for cls in (*BY_ELEMENT, *BY_WEIGHT)), *((cls, {"fused": True}) for cls in HAVE_FUSED_KERNELS)],
)
def test_the_bits_of_each_optimizer(
    cls: Any, flags: dict[str, Any], alone: int, lowered: bool, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, with casts, copies, sums and factors; in some steps a weight has no gradient.

    Norms have the precision that they need, whatever is torch's default dtype.
    """
    monkeypatch.setattr(unit_steps, "_ALONE", alone)

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        parameters = [p for p in model.parameters() if p.dim() == 2 or cls not in BY_WEIGHT]  # Muon takes matrices
        optimizer = cls(parameters, lr=0.01, **flags, **SETTINGS.get(cls.__name__, {}))
        for number in range(4):
            model.zero_grad()
            for _ in range(2 if clips else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                    loss = model(X).square().mean()
                with pipeline.optimizers.clipping.measuring_norms() if pipeline and clips else nullcontext():
                    loss.backward()
            if clips and pipeline is not None:
                pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.01)
            elif clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if number == 2 or (number == 0 and not flags):  # torch's fused SGD wants all momenta, or none
                model[1].weight.grad = None
            optimizer.step()
        return everything(model, optimizer)

    with torchs_defaults(torch.float16):
        stats = check_story(story, lambda: chain().float())
    assert stats.overlapped_steps >= 4 * 4  # where nothing in a unit has a gradient there is no step


@pytest.mark.parametrize("cls", BY_WEIGHT)
def test_a_step_under_autocast_multiplies_matrices_in_its_dtype(cls: type[Optimizer]) -> None:
    """As with manual optimization in mixed precision; autocast is a setting of the thread that calls `step`."""
    # Muon multiplies in bf16 anyway, and Adafactor's sums of squares overflow in fp16
    dtype = torch.bfloat16 if cls is torch.optim.Adafactor else torch.float16

    def matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)])

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer = cls(model.parameters(), lr=0.05)  # type: ignore[call-arg]
        for _ in range(4):
            with torch.autocast("cpu", dtype=dtype):
                plain_step(model, optimizer)
        assert pipeline is None or pipeline.stats.overlapped_steps == 0
        plain_step(model, optimizer)
        return everything(model, optimizer)

    assert check_story(story, matrices).overlapped_steps == 5


# ---------------------------------------------------------------------------------------------- nobody sees half a step


@pytest.mark.parametrize("cls", [*BY_ELEMENT, *BY_WEIGHT, ASGD])
def test_the_default_dtype_of_a_forward_is_not_that_of_a_step(cls: type[Optimizer]) -> None:
    """Lightning sets it around forwards in half precision; a step that is under way then has begun before."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Tensor]:
        optimizer = cls([p for p in model.parameters() if p.dim() == 2], lr=0.01)  # type: ignore[call-arg]
        plain_step(model, optimizer)
        for _ in range(2):
            with held_up(pipeline) as gate:
                open_soon(gate)
                plain_step(model, optimizer)
                with torchs_defaults(torch.bfloat16):
                    model(X)
        return everything(model, optimizer)

    check_story(story)


LOOKS: dict[str, Callable[[nn.Module, Optimizer], list[Tensor]]] = {
    "weights": lambda model, _: [p.detach().clone() for p in model.parameters()],
    "data": lambda model, _: [layer.weight.data.clone() for layer in model],
    "state_dict": lambda model, _: list(copy.deepcopy(model.state_dict()).values()),
    "optimizer state": lambda model, optimizer: [
        s[key] for _, s in sorted(copy.deepcopy(optimizer.state_dict())["state"].items()) for key in sorted(s)
    ],
    "deepcopy": lambda model, _: list(copy.deepcopy(model).parameters()),
    "pickle": lambda model, _: list(pickle.loads(pickle.dumps(model)).parameters()),
    "an evaluation": lambda model, _: [torch.no_grad()(model)(X)],
    "an average": lambda model, _: [torch.no_grad()(lambda: torch.zeros(WIDTH, WIDTH).lerp_(model[4].weight, 0.5))()],
    "in place": lambda model, _: [torch.no_grad()(lambda: model[4].weight.mul_(2).clone())()],
    "vector": lambda model, _: [nn.utils.parameters_to_vector(model.parameters()).detach()],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("step", [plain_step, autocast_step], ids=["fp32", "bf16"])
def test_every_access_sees_a_finished_step(step: Step, look: Callable[[nn.Module, Optimizer], list[Tensor]]) -> None:
    """The first look after a step, while all of its work is still to be done."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Tensor]:
        optimizer = adam(model)
        for _ in range(2):
            step(model, optimizer)
        with held_up(pipeline) as gate:
            step(model, optimizer)
            open_soon(gate)
            return look(model, optimizer)

    check_story(story)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"), reason="this torch compiles unnoticed by other threads"
)
def test_a_step_is_finished_before_anything_is_compiled() -> None:
    """Optimizers ask torch whether it compiles, which holds for all threads, and round otherwise if it does."""
    finished = []

    with attached(model := chain()) as pipeline:
        optimizer = adam(model)
        plain_step(model, optimizer)

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            finished.append(nothing_is_stepped(pipeline))
            return graph.forward

        with held_up(pipeline) as gate:
            plain_step(model, optimizer)
            assert not nothing_is_stepped(pipeline)
            threading.Timer(2.0, gate.set).start()  # later than torch would compile
            torch.compile(lambda x: x.sin(), backend=backend)(X)
    assert finished == [True]


def fail_to_step(*_: Any) -> None:
    raise ArithmeticError("the optimizer is lost")


USES: dict[str, Callable[[nn.Module, Pipeline], Any]] = {
    "a look": lambda model, _: model[0].weight.data,
    "a forward": lambda model, _: model(X),
    "detaching": lambda _, pipeline: pipeline.detach(),
}


@pytest.mark.parametrize("use", USES)
def test_an_error_in_a_step_surfaces(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """With whoever looks next, or with the next forward; nothing goes on with half a step in silence."""
    model = chain()
    masters = list(model.parameters())
    with attached(model) as pipeline:
        optimizer = adam(model)
        plain_step(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(unit_steps, "update_weights", fail_to_step)
            plain_step(model, optimizer)
            with pytest.raises(ArithmeticError, match="the optimizer is lost"):
                USES[use](model, pipeline)
            for p in masters:  # each group has its own failure, told of once
                with suppress(ArithmeticError):
                    p.sum()
        assert nothing_is_stepped(pipeline)
    assert {type(layer) for layer in model} == {nn.Linear}
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model(X).isfinite().all()


# ------------------------------------------------------------------------------------------------------- who steps what


def with_a_new_option(parameters: Any) -> Optimizer:
    """Of a torch that is newer than this package."""
    optimizer = torch.optim.AdamW(parameters)
    optimizer.defaults["extra"] = False
    return optimizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(Own, lr=0.1), "Own is not one of torch's"),
        (with_a_new_option, "AdamW has an option that superpipeline does not know, 'extra'"),
    ],
    ids=["class", "option"],
)
def test_must_overlap_raises_with_the_reason(make: Callable[[Any], Optimizer], why: str) -> None:
    """By name, with what to do; with 'auto' the optimizer steps plainly."""
    model = chain()
    with attached(model, overlap_optimizer=True):
        optimizer = make(model.parameters())
        with pytest.raises(ValueError, match=f"`overlap_optimizer=True` is not possible, because {why}.*'auto'"):
            plain_step(model, optimizer)


def halve_in_place(betas: list[Any]) -> None:
    """As somebody's schedule does."""
    betas[0] *= 0.5


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_settings_in_a_list_that_change_under_a_step(kind: Callable[[float], Any]) -> None:
    """The step has those from when it was called."""

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        rate = torch.tensor(0.1) if kind is torch.tensor else 0.1
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
        betas = optimizer.param_groups[0]["betas"] = [kind(0.9), kind(0.99)]
        plain_step(model, optimizer)  # it makes state, for which everybody waits
        for _ in range(2):
            with held_up(pipeline):
                plain_step(model, optimizer)
                halve_in_place(betas)
        return everything(model, optimizer)

    check_story(story)


def parameters_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_an_optimizers_own_hooks_see_all_of_it(kind: str) -> None:
    """A hook on the step that clips, or logs, must not see fewer parameters than there are."""
    model = chain()
    with attached(model):
        optimizer = adam(model)
        whole, seen = parameters_of(optimizer), []
        register = optimizer.register_step_pre_hook if kind == "pre" else optimizer.register_step_post_hook
        register(lambda *_: seen.append(parameters_of(optimizer)))
        plain_step(model, optimizer)
        assert seen == [whole]
        assert parameters_of(optimizer) == whole


@pytest.mark.parametrize("who", ["a hook", "the optimizer"])
def test_param_groups_are_whole_again_after_an_exception(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or `zero_grad` after it would miss weights; and then everything goes on."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer = adam(model)
        plain_step(model, optimizer)
        whole = parameters_of(optimizer)
        optimizer.zero_grad()
        model(X).square().mean().backward()
        with monkeypatch.context() as patch:
            handle = optimizer.register_step_pre_hook(fail) if who == "a hook" else None
            if who == "the optimizer":
                patch.setattr(optimizer, "_init_group", fail)
            with pytest.raises(KeyboardInterrupt), pipeline.step() if pipeline else nullcontext():
                optimizer.step()
            if handle is not None:
                handle.remove()
        assert parameters_of(optimizer) == whole
        optimizer.zero_grad()
        assert [p.grad for p in model.parameters()] == [None] * 10
        plain_step(model, optimizer)
        return everything(model, optimizer)

    check_story(story)


def test_an_optimizer_that_is_dropped_is_freed() -> None:
    """With its state, which is twice as large as the model. Somebody makes a new one for each phase of a training."""
    model = chain()
    with attached(model) as pipeline:
        for _ in range(2):
            optimizer = adam(model)
            for _ in range(2):
                plain_step(model, optimizer)
            pipeline._engine.settle()
            alive = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            assert alive() is None
            assert pipeline.summary().optimizer_bytes == 0
