"""A loop of one's own under Fabric has the numbers of Fabric's single-device strategy, bit for bit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import lightning as L
import lightning_fabric
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

import sp_lightning.fabric
import sp_lightning.lightning_fabric
from sp_lightning import optim
from sp_lightning.fabric import SuperpipelineStrategy

from .helpers import Bomb, Run, Trace, assert_same_trace, frozen, note_gradients, note_outputs, note_state, overwrite
from .lightning_modules import assert_plain
from .zoo import CASES
from .zoo.blocks import WIDTH, Block, Chain, chain

Program = Callable[[Fabric, Trace], None]
STRATEGIES = {
    "plain": SingleDeviceStrategy,
    "streamed": lambda **options: SuperpipelineStrategy(**{"k": 2, "debug": True, **options}),
}


def fabric_with(strategy: Any, precision: Any = "32-true") -> Fabric:
    """A Fabric on the CPU, not launched; with a scaler, too, which Fabric itself has on a GPU only."""
    scales = precision == "16-mixed"
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))] if scales else []
    precision = None if scales else precision
    return Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision, plugins=plugins)


def assert_same_numbers(program: Program, precision: str = "32-true", **options: Any) -> None:
    traces: list[Trace] = [{}, {}]
    for strategy, trace in zip((STRATEGIES["plain"](), STRATEGIES["streamed"](**options)), traces, strict=True):
        torch.manual_seed(5)
        program(fabric_with(strategy, precision), trace)
    assert traces[0], "nothing was compared"
    assert_same_trace(*traces)


def of_zoo(name: str, fabric: Fabric, trace: Trace) -> None:
    """Train one of the zoo's models: accumulation, clipping, evaluation."""
    case = CASES[name]
    built = case.model()
    model, *optimizers = fabric.setup(built, *case.optimizers(built))
    for number, batch in enumerate(case.batches(3 * case.accumulate)):
        if case.train_step is not None:
            note_outputs(trace, f"{number}", list(case.train_step(model, batch, optimizers)))
            continue
        accumulates = (number + 1) % case.accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            if case.backward is not None:
                losses = list(case.backward(model, batch))
            else:
                losses = [case.loss(case.call(model, batch), batch)]
                fabric.backward(losses[0])
        note_outputs(trace, f"{number} / loss", losses)
        if accumulates:
            continue
        if case.clip is not None:
            trace[f"{number} / norm"] = frozen(fabric.clip_gradients(model, optimizers[0], max_norm=case.clip))
        optimizers[0].step()
        optimizers[0].zero_grad()
        with torch.no_grad():
            note_outputs(trace, f"{number} / output", case.call(model, batch))
    note_state(trace, "end", built, [optimizer.optimizer for optimizer in optimizers])


@pytest.mark.parametrize("name", ["gan", "two-graphs", "weight-gradient-penalty"])
def test_models_of_the_zoo(name):
    assert_same_numbers(partial(of_zoo, name), units=CASES[name].units)


@pytest.mark.parametrize("options", [{"activations": "recompute"}, {"k": "auto", "memory_budget": "1GiB"}], ids=str)
@pytest.mark.parametrize(("name", "precision"), [("chain", "bf16-mixed"), ("siamese", "16-mixed")])
def test_mixed_precision(name, precision, options):
    assert_same_numbers(partial(of_zoo, name), precision, **options)


# ------------------------------------------------------------------------------------------------------------- programs


def learn(fabric: Fabric, trace: Trace, built: nn.Module, optimizer: Any, losses: Iterator[Tensor]) -> None:
    """A step for each loss."""
    for number, loss in enumerate(losses):
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        trace[f"{number} / loss"] = frozen(loss)
    note_state(trace, "end", built, [optimizer.optimizer])


def meta_learning(fabric: Fabric, trace: Trace) -> None:
    """MAML of two inner steps: gradients by weights, and gradients of those."""
    built = chain(3)
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))

    def error(step: int) -> Tensor:
        fast = dict(built.named_parameters())
        error = model(Run.rows(step)).square().mean()
        for inner in range(2):
            gradients = torch.autograd.grad(error, list(fast.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(fast.items(), gradients, strict=True)}
            error = functional_call(built, fast, (Run.rows(step + inner),)).square().mean()
        return error

    learn(fabric, trace, built, optimizer, map(error, range(3)))


def clipped(fabric: Fabric, trace: Trace, models: int = 1) -> None:
    """By norms of two kinds and by value, with an optimizer over all models."""
    built = nn.ModuleList(chain(3) for _ in range(models))
    ours = [*map(fabric.setup_module, built)]
    optimizer = fabric.setup_optimizers(SGD(built.parameters(), lr=0.1, momentum=0.9))
    ways = {"max_norm": 0.1}, {"max_norm": torch.tensor(0.1)}, {"clip_val": 1e-3}, {"max_norm": 1, "norm_type": 1.0}
    for step, how in enumerate(ways):
        optimizer.zero_grad()
        fabric.backward(reduce(lambda x, model: model(x), ours, Run.rows(step)).square().mean())
        note_outputs(trace, f"{step}", fabric.clip_gradients(ours[0], optimizer, **how))
        note_gradients(trace, f"{step}", dict(built.named_parameters()))
        optimizer.step()
    note_state(trace, "end", built, [optimizer.optimizer])


def surprised(fabric: Fabric, trace: Trace) -> None:
    """Exceptions in a forward, in a backward and in the loop, and forwards whose backward never comes."""
    built = Chain([Block(), Bomb(), Block(), Block()])
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    bomb = built.blocks[1]
    for step, bomb.where in enumerate(["nowhere", "forward", "backward", "loop", "nowhere"]):
        bomb.error = ValueError if bomb.where in ("forward", "backward") else None
        with suppress(ValueError):
            loss = model(Run.rows(step)).square().mean()
            if bomb.where == "loop":
                raise ValueError
            fabric.backward(loss)
            optimizer.step()
            trace[f"{step}"] = frozen(loss)
        bomb.error = None
        optimizer.zero_grad()
        for around in (lambda x: checkpoint(model, x, use_reentrant=False), model):  # without `no_grad`
            trace[f"{step} / output"] = frozen(around(Run.rows(9).requires_grad_()))
    (2 * checkpoint(model, Run.rows(1).requires_grad_(), use_reentrant=False)).sum().backward()
    optimizer.step()
    pickled = pickle.loads(pickle.dumps(model))
    assert type(pickled._forward_module) is Chain
    note_outputs(trace, "pickled", pickled(Run.rows(0)))
    note_state(trace, "end", built, [optimizer.optimizer])


class Called(L.LightningModule):
    """A module with methods that are steps, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) * self.scale).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def encode(self, x: Tensor) -> Tensor:
        return (self.body.blocks[0](x) + self.scale).square().mean()


def methods(fabric: Fabric, trace: Trace) -> None:
    built = Called()
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    model.mark_forward_method("encode")
    assert built.device == fabric.device
    steps = (model.encode(Run.rows(step)) + model.training_step(Run.rows(step)) for step in range(3))
    learn(fabric, trace, built, optimizer, steps)
    assert next(model.named_parameters())[0] == "_forward_module.scale"
    note_outputs(trace, "copy", copy.deepcopy(model)(Run.rows(0)))


def told_apart(fabric: Fabric, trace: Trace) -> None:
    """Called twice before one backward, with a penalty."""
    built = chain(4)
    model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))

    def error(step: int) -> Tensor:
        error = model(Run.rows(step)).float().square().mean() + model(Run.rows(step + 9)).float().exp().mean()
        return error + sum(weight.float().square().sum() for weight in built.parameters())

    learn(fabric, trace, built, optimizer, map(error, range(3)))


def in_parts(fabric: Fabric, trace: Trace) -> None:
    """Blocks that the loop calls itself, before and after a penalty has used all weights outside of these."""
    built = Called()
    model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))

    def error(step: int) -> Tensor:
        error = built.body.blocks[2](built.body.blocks[0](Run.rows(step))).square().mean()
        penalty = sum(weight.square().sum() for weight in built.parameters()) if step == 1 else 0
        return error + model.training_step(Run.rows(step)) + penalty

    learn(fabric, trace, built, optimizer, map(error, range(4)))


def compiled(fabric: Fabric, trace: Trace) -> None:
    torch._dynamo.reset()
    built = chain(3)
    model, optimizer = fabric.setup(torch.compile(built, backend="eager"), SGD(built.parameters(), lr=0.1))
    learn(fabric, trace, built, optimizer, (model(Run.rows(step)).square().mean() for step in range(3)))


PROGRAMS = [meta_learning, partial(clipped, models=2), surprised, methods, in_parts, compiled]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: getattr(program, "__name__", "clipped"))
def test_programs(program):
    assert_same_numbers(program)
    assert_same_numbers(program, k="auto", memory_budget="1GiB")  # steps are measured, and planned


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_precision(precision):
    assert_same_numbers(clipped, precision)
    assert_same_numbers(told_apart, precision)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def trained(fabric: Fabric, steps: int, path: Path, resume: Path | None = None) -> Trace:
    """Train from the step that a file has, save, and go on with another one's weights."""
    torch.manual_seed(1)
    built, trace = chain(4), Trace()
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    fabric.save(f"{path}.raw", model.state_dict())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        assert fabric.load(resume, state) == {}
    learn(fabric, trace, built, optimizer, (model(Run.rows(n)).square().mean() for n in range(state["step"], steps)))
    fabric.save(path, {**state, "step": steps}, filter={"model": lambda name, value: True})
    fabric.load_raw(f"{path}.raw", model)
    note_outputs(trace, "raw", model(Run.rows(0)))
    return {label: value for label, value in trace.items() if "loss" not in label}


@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("first", STRATEGIES)
def test_resume_in_both_directions(tmp_path, first, second):
    expected = trained(fabric_with(STRATEGIES["plain"]()), 4, tmp_path / "whole")
    trained(fabric_with(STRATEGIES[first]()), 2, tmp_path / "half")
    actual = trained(fabric_with(STRATEGIES[second]()), 4, tmp_path / "resumed", tmp_path / "half")
    assert_same_trace(expected, actual)
    whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in resumed["model"].values())


class Average:
    """Keeps what it is given, as a user's own average of weights does."""

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


@pytest.mark.parametrize("make", [AdamW, optim.AdamW, partial(LBFGS, max_iter=2)])
def test_what_was_loaded_is_the_users_own(tmp_path, make):
    """Also when the file is written again, in place, as a user's own `torch.save` does."""

    def program(fabric: Fabric, trace: Trace) -> None:
        path, built, average = tmp_path / "a.ckpt", chain(3), Average()
        built.metric = MeanMetric()
        built.metric.persistent(True)
        model, optimizer = fabric.setup(built, make(built.parameters()))

        def loss() -> Tensor:
            optimizer.zero_grad()
            loss = model(Run.rows(0)).square().mean()
            fabric.backward(loss)
            return loss

        optimizer.step(loss)
        built.metric.update(3.0)
        average.shadow = {name: weight.detach().clone() for name, weight in built.named_parameters()}
        state = {"model": model, "optimizer": optimizer, "average": average, "rows": Run.rows(3)}
        fabric.save(path, {**state, "left": Run.rows(4)})
        whole, left = fabric.load(path), fabric.load(path, state)
        overwrite(path)
        optimizer.step(loss)
        note_outputs(trace, "loaded", [whole, left, state["rows"], average.shadow, built.metric.compute()])
        note_state(trace, "end", built, [])

    assert_same_numbers(program)


# ------------------------------------------------------------------------------------------------- what Fabric may ask


def test_weights_stay_on_the_host_and_come_back():
    """Nothing of a model goes to the device when it is set up, and a model that is dropped is a plain one."""
    fabric = fabric_with(SuperpipelineStrategy(k=1))
    with fabric.init_module(empty_init=True):
        built = chain(3)
    with torch.device("meta"):
        other = Chain([Block(), Block()])
    metric, plain = fabric.to_device(nn.BatchNorm1d(3, affine=False)), fabric.setup(nn.Tanh())
    assert torch.equal(plain(metric(torch.zeros(2, 3))), torch.zeros(2, 3))
    names = dict(built.named_parameters())
    model, late = fabric.setup_module(built), fabric.setup_module(other)
    assert all(parameter is names[name] for name, parameter in built.named_parameters())
    assert [pipeline.module for pipeline in fabric.strategy.pipelines] == [built, other]
    again = fabric.setup_module(built, move_to_device=False)  # once more, as plain Fabric allows
    assert {called(Run.rows(0)).shape for called in (model, again, late)} == {(5, WIDTH)}
    gone, cycle = weakref.ref(other), [model, again]
    cycle.append(cycle)
    del late, other, model, again, cycle
    gc.collect()
    assert gone() is None, "a dropped model is freed"
    assert_plain(built)
    assert fabric.strategy.pipelines == []


def test_a_step_that_begins_with_weights():
    """Before any model is called there is no step: what to do is in the error, and `strategy.step` opens one."""
    fabric, built = fabric_with(STRATEGIES["streamed"]()), chain(3)
    model = fabric.setup_module(built)

    def gradients(step: AbstractContextManager[None]) -> list[Tensor]:
        built.zero_grad()
        with step:
            weights = {name: weight.clone() for name, weight in built.named_parameters()}
            fabric.backward(functional_call(built, weights, (Run.rows(0),)).square().mean())
        return [weight.grad.clone() for weight in built.parameters()]

    with pytest.raises(RuntimeError, match=r"outside of a step.*`fabric.strategy.step\(\)`"):
        gradients(nullcontext())
    found = gradients(fabric.strategy.step())
    built.zero_grad()
    fabric.backward(model(Run.rows(0)).square().mean())
    assert all(torch.equal(weight.grad, gradient) for weight, gradient in zip(built.parameters(), found, strict=True))


def test_norms_that_are_not_finite():
    fabric, built = fabric_with(STRATEGIES["streamed"]()), chain(2)
    model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))
    fabric.backward(model(Run.rows(0)).sum() * torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


@pytest.mark.parametrize("ours", [sp_lightning.fabric, sp_lightning.lightning_fabric])
def test_names(ours):
    package = lightning_fabric.Fabric if ours is sp_lightning.lightning_fabric else Fabric
    fabric = package(accelerator="cpu", devices=1, strategy="superpipeline")
    assert type(fabric.strategy) is ours.SuperpipelineStrategy
    built = chain(2)
    model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))
    fabric.backward(model(Run.rows(0)).sum())
    optimizer.step()
    assert fabric.strategy.pipelines[0].stats.optimizer_steps == 1


def test_files_before_a_model_is_set_up(tmp_path):
    """Nobody has launched, and nothing was set up: files are written and read by the strategy's own plugin."""
    fabric = fabric_with(SuperpipelineStrategy(k=2))
    fabric.save(tmp_path / "state.ckpt", {"step": 3})
    assert fabric.load(tmp_path / "state.ckpt") == {"step": 3}
    assert type(fabric.strategy.checkpoint_io) is sp_lightning.fabric.SuperpipelineCheckpointIO


def test_what_is_said(caplog):
    """One line tells what streams; several devices still need `launch()`."""
    fabric_with(SuperpipelineStrategy(k=2)).setup_module(chain(3))
    assert "superpipeline: Chain has 3 units, of which 2 are on cpu at once." in caplog.messages
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        Fabric(accelerator="cpu", devices=2, strategy="superpipeline").setup_module(chain(3))
