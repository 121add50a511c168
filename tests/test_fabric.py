"""A loop of one's own under Fabric has the numbers of Fabric's single-device strategy, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import lightning_fabric
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import sp_lightning.fabric
import sp_lightning.lightning_fabric
from sp_lightning.fabric import SuperpipelineStrategy

from .helpers import Bomb, Run, Trace, assert_same_trace, frozen, note_outputs, note_state
from .lightning_modules import assert_plain
from .zoo import CASES
from .zoo.blocks import WIDTH, Block, Chain, chain

Program = Callable[[Fabric, Trace], None]
STRATEGIES = {
    "plain": SingleDeviceStrategy,
    "streamed": lambda **options: SuperpipelineStrategy(**{"k": 2, "debug": True, **options}),
}


def fabric_with(strategy: Any, precision: Any = "32-true", plugins: Sequence[Any] = ()) -> Fabric:
    """A Fabric on the CPU; with a scaler, too, which Fabric itself has on a GPU only."""
    if precision == "16-mixed":
        plugins, precision = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))], None
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision, plugins=list(plugins))
    fabric.launch()
    return fabric


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


ZOO = [
    "vit", "llama-untied", "llava", "unet", "chain", "gan", "two-losses", "two-graphs",
    "input-gradient-penalty", "weight-gradient-penalty", "checkpointed-blocks-plain",
]  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo(name):
    assert_same_numbers(partial(of_zoo, name), units=CASES[name].units)


@pytest.mark.parametrize("options", [{"activations": "recompute"}, {"k": "auto", "memory_budget": "1GiB"}], ids=str)
@pytest.mark.parametrize(("name", "precision"), [("chain", "bf16-mixed"), ("siamese", "16-mixed")])
def test_mixed_precision(name, precision, options):
    assert_same_numbers(partial(of_zoo, name), precision, **options)


# ------------------------------------------------------------------------------------------------------------- programs


def dcgan(fabric: Fabric, trace: Trace) -> None:
    """Two networks with convolutions, each with an optimizer."""

    def block(cls: type[nn.Module], *sizes: int) -> nn.Module:
        return nn.Sequential(cls(*sizes, 4, 2, 1, bias=False), nn.BatchNorm2d(sizes[1]), nn.LeakyReLU(0.2))

    made = nn.Sequential(block(nn.ConvTranspose2d, 4, 8), block(nn.ConvTranspose2d, 8, 3), nn.Tanh())
    judge = nn.Sequential(block(nn.Conv2d, 3, 8), block(nn.Conv2d, 8, 4), nn.Flatten(), nn.Linear(16, 1))
    generator, of_generator = fabric.setup(made, Adam(made.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    critic, of_critic = fabric.setup(judge, Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    for step in range(3):
        of_critic.zero_grad()
        real = fabric.to_device(torch.randn(4, 3, 8, 8))
        right = F.softplus(-critic(real)).mean()
        fabric.backward(right)
        fake = generator(fabric.to_device(torch.randn(4, 4, 2, 2)))
        wrong = F.softplus(critic(fake.detach())).mean()
        fabric.backward(wrong)
        of_critic.step()
        of_generator.zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fabric.backward(fooled)
        of_generator.step()
        note_outputs(trace, f"{step}", [right, wrong, fooled])
        with torch.no_grad():
            trace[f"{step} / sample"] = frozen(generator(torch.ones(2, 4, 2, 2)))
    for name, model in (("generator", made), ("critic", judge)):
        note_state(trace, name, model, [])


def penalized(fabric: Fabric, trace: Trace) -> None:
    """A distance to a teacher's weights (L2-SP), an average of weights (EMA), gradients that the loop changes."""
    built, teaching = chain(4), chain(4).requires_grad_(False)
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    teacher = fabric.setup_module(teaching)
    average = [parameter.detach().clone() for parameter in built.parameters()]
    for step in range(4):
        x = Run.rows(step)
        pairs = zip(built.parameters(), teaching.parameters(), strict=True)
        loss = F.mse_loss(model(x), teacher(x)) + sum((own - other).square().sum() for own, other in pairs)
        optimizer.zero_grad()
        loss.backward() if step % 2 else fabric.backward(loss)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            optimizer.step()
            for mean, parameter in zip(average, built.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        note_outputs(trace, f"{step}", [loss, *average])
    note_state(trace, "end", built, [optimizer.optimizer])


def meta_learning(fabric: Fabric, trace: Trace) -> None:
    """MAML of two inner steps: gradients by weights, and gradients of those."""
    built = chain(3)
    model, optimizer = fabric.setup(built, Adam(built.parameters(), lr=1e-2))
    for step in range(3):
        fast = dict(built.named_parameters())
        error = model(Run.rows(step)).square().mean()
        for inner in range(2):
            gradients = torch.autograd.grad(error, list(fast.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(fast.items(), gradients, strict=True)}
            error = functional_call(built, fast, (Run.rows(step + inner),)).square().mean()
        optimizer.zero_grad()
        fabric.backward(error)
        optimizer.step()
    note_state(trace, "end", built, [optimizer.optimizer])


def k_fold(fabric: Fabric, trace: Trace) -> None:
    """A new model for each fold, which goes when its fold is over, and data that is shuffled by Fabric's loaders."""
    data = TensorDataset(torch.randn(12, WIDTH), torch.randn(12, WIDTH))
    fabric.seed_everything(3, verbose=False)
    for fold in range(3):
        built = Chain([Block() for _ in range(3)])
        model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
        for number, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            if number != fold:
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
            trace[f"{fold} / {number}"] = frozen(fabric.all_reduce(loss.detach()))
        note_state(trace, f"{fold}", built, [])


def clipped(fabric: Fabric, trace: Trace) -> None:
    """By norms of two kinds and by value, with an optimizer over two models."""
    first, second = chain(3), chain(2)
    models = [fabric.setup_module(module) for module in (first, second)]
    weights = [*first.parameters(), *second.parameters()]
    optimizer = fabric.setup_optimizers(SGD(weights, lr=0.1, momentum=0.9))
    for step, how in enumerate(
        [{"max_norm": 0.1}, {"max_norm": 0.1}, {"clip_val": 1e-3}, {"max_norm": 0.1, "norm_type": 1.0}]
    ):
        loss = models[1](models[0](Run.rows(step).to(first.blocks[0].up.weight.dtype))).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        norm = fabric.clip_gradients(models[0], optimizer, **how)
        note_outputs(trace, f"{step}", [loss, norm, *(weight.grad.clone() for weight in weights)])
        optimizer.step()
    note_state(trace, "end", nn.ModuleList([first, second]), [optimizer.optimizer])


def surprised(fabric: Fabric, trace: Trace) -> None:
    """Exceptions in a forward, in a backward and in the loop, and forwards whose backward never comes."""
    built = Chain([Block(), Bomb(), Block(), Block()])
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    for step, where in enumerate(["nowhere", "forward", "backward", "loop", "nowhere", "skipped", "nowhere"]):
        bomb = built.blocks[1]
        bomb.where, bomb.error = where, ValueError if where in ("forward", "backward") else None
        optimizer.zero_grad()
        try:
            loss = model(Run.rows(step)).square().mean()
            if where == "loop":
                raise ValueError
            if where != "skipped":
                fabric.backward(loss)
        except ValueError:
            continue
        finally:
            bomb.error = None
        if where == "nowhere":
            optimizer.step()
        trace[f"{step}"] = frozen(loss)
        for around in (lambda x: checkpoint(model, x, use_reentrant=False), model):  # without `no_grad`
            trace[f"{step} / output"] = frozen(around(Run.rows(9).requires_grad_()))
    optimizer.zero_grad()
    (2 * checkpoint(model, Run.rows(1).requires_grad_(), use_reentrant=False)).sum().backward()
    optimizer.step()
    note_state(trace, "end", built, [optimizer.optimizer])


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_precision(precision):
    assert_same_numbers(clipped, precision)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def trained(fabric: Fabric, steps: int, path: Path | None = None, resume: Path | None = None) -> Trace:
    """Train from the step that a file has; save one with a model, an optimizer and a number."""
    torch.manual_seed(1)
    built = chain(4)
    built.register_buffer("seen", torch.zeros(()))
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        assert fabric.load(resume, state) == {}
    for step in range(state["step"], steps):
        optimizer.zero_grad()
        fabric.backward(model(Run.rows(step)).square().mean())
        optimizer.step()
        built.seen.add_(1)
    if path is not None:
        fabric.save(path, {**state, "step": steps}, filter={"model": lambda name, value: True})
        fabric.save(f"{path}.raw", model.state_dict())
    trace: Trace = {}
    note_state(trace, "end", built, [optimizer.optimizer])
    fabric.load_raw(f"{path or resume}.raw", model)
    note_state(trace, "raw", built, [optimizer.optimizer])
    note_outputs(trace, "raw", model(Run.rows(0)))
    return trace


@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("first", STRATEGIES)
def test_resume_in_both_directions(tmp_path, first, second):
    expected = trained(fabric_with(STRATEGIES["plain"]()), 4, tmp_path / "whole")
    trained(fabric_with(STRATEGIES[first]()), 2, tmp_path / "half")
    whole, half = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in half["model"].values())
    torch.save(torch.load(tmp_path / "whole.raw", weights_only=True), tmp_path / "half.raw")
    assert_same_trace(expected, trained(fabric_with(STRATEGIES[second]()), 4, resume=tmp_path / "half"))


class Called(L.LightningModule):
    """A module with steps of its own, one of which is marked, and a weight that a loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self(batch) * self.scale).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.body.blocks[0](x) + self.scale


def methods(fabric: Fabric, trace: Trace) -> None:
    built = Called()
    model, optimizer = fabric.setup(built, AdamW(built.parameters(), lr=1e-2))
    model.mark_forward_method("encode")
    assert built.device == fabric.device
    for step in range(3):
        x = Run.rows(step)
        for loss in (model.training_step(x), model.encode(x).square().mean() + model.scale.sum()):
            fabric.backward(loss)
            trace[f"{step} / loss"] = frozen(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert next(model.named_parameters())[0] == "_forward_module.scale"
    note_outputs(trace, "copy", copy.deepcopy(model)(Run.rows(0)))
    note_state(trace, "end", built, [optimizer.optimizer])


def compiled(fabric: Fabric, trace: Trace) -> None:
    torch._dynamo.reset()
    built = chain(3)
    model, optimizer = fabric.setup(torch.compile(built, backend="eager"), SGD(built.parameters(), lr=0.1))
    for step in range(3):
        fabric.backward(model(Run.rows(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    note_state(trace, "end", built, [])


@pytest.mark.parametrize("program", [dcgan, penalized, meta_learning, k_fold, clipped, surprised, methods, compiled])
def test_programs(program):
    assert_same_numbers(program)


def test_weights_stay_on_the_host_and_come_back(tmp_path):
    """Nothing of a model goes to the device when it is set up, and a model that is dropped is a plain one."""
    fabric = fabric_with(SuperpipelineStrategy(k=1))
    with fabric.init_module(empty_init=True):
        built = Chain([Block() for _ in range(3)])
        assert torch.empty(0).device.type == "cpu"
    with torch.device("meta"):
        other = Chain([Block() for _ in range(2)])
    metric, plain = fabric.to_device(nn.BatchNorm1d(3, affine=False)), fabric.setup(nn.Tanh())
    assert torch.equal(plain(metric(torch.zeros(2, 3))), torch.zeros(2, 3))
    names = dict(built.named_parameters())
    model, late = fabric.setup_module(built), fabric.setup_module(other)
    assert all(parameter is names[name] for name, parameter in built.named_parameters())
    assert [pipeline.module for pipeline in fabric.strategy.pipelines] == [built, other]
    again = fabric.setup_module(built, move_to_device=False)  # once more, as plain Fabric allows
    for called in (model, again, late):
        assert called(Run.rows(0)).shape == (5, WIDTH)
    gone = weakref.ref(late.module)
    del late, called, other
    gc.collect()
    assert gone() is None, "a dropped model is freed"
    cycle = [model, again]
    cycle.append(cycle)
    del model, again, cycle
    gc.collect()
    assert_plain(built)
    assert fabric.strategy.pipelines == []


def test_a_step_that_begins_with_weights():
    """Before any model is called there is no step: what to do is in the error, and `strategy.step` opens one."""
    fabric, built = fabric_with(STRATEGIES["streamed"]()), chain(3)
    model = fabric.setup_module(built)

    def loss() -> Tensor:
        weights = {name: weight.clone() for name, weight in built.named_parameters()}
        return functional_call(built, weights, (Run.rows(0),)).square().mean()

    with pytest.raises(RuntimeError, match=r"outside of a step.*`fabric.strategy.step\(\)`"):
        fabric.backward(loss())
    built.zero_grad()
    with fabric.strategy.step():
        fabric.backward(loss())
    grads = [weight.grad.clone() for weight in built.parameters()]
    built.zero_grad()
    fabric.backward(model(Run.rows(0)).square().mean())
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(built.parameters(), grads, strict=True))


def test_what_is_refused():
    class Layers(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            return module

    with pytest.raises(MisconfigurationException, match="`Layers` does not work"):
        fabric_with(SuperpipelineStrategy(), None, plugins=[Layers()])
    with pytest.raises(ValueError, match="`k=0`"):
        SuperpipelineStrategy(k=0)
    fabric, built = fabric_with(STRATEGIES["streamed"]()), chain(2)
    model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))
    fabric.backward(model(Run.rows(0)).sum() * torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


@pytest.mark.parametrize("name", ["superpipeline", "superpipeline_recompute", "superpipeline_offload"])
def test_names(name):
    for package, ours in ((Fabric, sp_lightning.fabric), (lightning_fabric.Fabric, sp_lightning.lightning_fabric)):
        fabric = package(accelerator="cpu", devices=1, strategy=name)
        assert type(fabric.strategy) is ours.SuperpipelineStrategy
        assert fabric.strategy.options.activations == name.partition("_")[2] or "auto"
        fabric.launch()
        built = chain(2)
        model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1))
        fabric.backward(model(Run.rows(0)).sum())
        optimizer.step()
        assert fabric.strategy.pipelines[0].stats.optimizer_steps == 1
