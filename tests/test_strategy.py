"""The strategy trains, validates, tests and predicts bit for bit as Lightning's single-device strategy does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from sp_lightning import SuperpipelineStrategy
from sp_lightning.trainer.host_memory import copy_pruned_originals

from .helpers import assert_same_trace
from .lightning_modules import (
    Adversaries,
    Base,
    Block,
    assert_plain,
    assert_same_training,
    fit,
    loader,
    plain,
    run,
    streamed,
    trainer,
)


def configured(configure: Callable[[Any], Any]) -> type[Base]:
    """The usual module with other optimizers."""
    return type("Configured", (Base,), {"configure_optimizers": configure})


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer and changes gradients before its steps, without `Optimizer.__init__`, as Opacus does."""

    def __init__(self, original: torch.optim.Optimizer) -> None:
        self.original = original
        self.defaults, self.state, self.param_groups = original.defaults, original.state, original.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        self.original.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.original.state_dict()


def by_class(module: Base) -> Any:
    """Param groups by the classes of layers."""
    groups = [
        {"params": [p for part in module.modules() if type(part) is kind for p in part.parameters()], "weight_decay": d}
        for kind, d in ((nn.Linear, 0.5), (nn.BatchNorm1d, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def by_step(module: Base) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]


def plateau(module: Base) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3),
    "wrapped": lambda m: Wrapper(torch.optim.AdamW(m.parameters(), lr=1e-2)),
    "by class": by_class,
    "scheduled by step": by_step,
    "scheduled by a monitor": plateau,
}


class Accumulating(Base):
    """Manual optimization with accumulation, and a backward for some weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.note("loss", loss)
        if batch_idx % 3 == 0:
            self.manual_backward(loss, inputs=list(self.head.parameters()))
        elif batch_idx % 3 == 1:
            loss.backward()
        else:
            self.manual_backward(loss)
            self.note("gradients", [p.grad for p in self.parameters()])
            self.optimizers().step()
            self.optimizers().zero_grad()


class Penalty(Base):
    """Reads weights outside of their unit, skips some batches, and leaves one weight without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        loss = self.loss(batch) * self.scale + 1e-3 * self.head.weight.square().sum()
        self.note("loss", loss)
        return {"loss": loss, "extra": loss.detach()}


class Late(Base):
    """Builds its blocks in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(blocks=0)

    def configure_model(self) -> None:
        if not self.blocks:
            assert torch.empty(0).device.type == "cpu"
            self.blocks.extend(Block() for _ in range(3))


class Langevin(Base):
    """Searches for inputs by backward passes of its own, while weights are frozen, as energy-based models do."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        x = batch[0].clone().requires_grad_()
        self.requires_grad_(False)
        for _ in range(2):
            self(x).float().sum().backward()
            x.data.sub_(0.1 * x.grad)
            x.grad.zero_()
        self.requires_grad_(True)
        return super().loss(batch) - self(x.detach()).float().mean() / 10


class AdaptiveWeight(Base):
    """Weighs two losses by their gradients for the last layer, as VQGAN does; nothing is computed after that."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        logits = self(batch[0]).float()
        losses = F.cross_entropy(logits, batch[1]), logits.square().mean()
        one, other = (torch.autograd.grad(loss, self.head.weight, retain_graph=True)[0].norm() for loss in losses)
        return losses[0] + (one / (other + 1e-4)).detach() * losses[1]


class Outside(Base):
    """Uses weights outside of their unit, within `optimizer.step(closure)`, in the way that `use` names."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.own = nn.Parameter(torch.ones(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weights = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        if self.use == "penalty":
            return loss + 0.01 * sum(weight.square().sum() for weight in weights)
        if self.use == "linear":
            return loss + F.linear(torch.ones(1, 2), self.own).square().sum() + weights[0].norm()
        gradients = torch.autograd.grad(loss, weights[:1], create_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("use", ["penalty", "linear", "gradient"])
def test_weights_outside_of_their_unit(use):
    """`debug` fails on any operation that mixes a master with what is on the device."""
    assert_same_training(lambda: Outside(use))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedulers(name):
    assert_same_training(configured(OPTIMIZERS[name]))


@pytest.mark.parametrize("kind", [Adversaries, Accumulating, Penalty, Late])
def test_modules(kind):
    assert_same_training(kind)


@pytest.mark.parametrize(
    ("kind", "activations", "precision"), [(Langevin, "recompute", "32-true"), (AdaptiveWeight, "keep", "bf16-mixed")]
)
def test_backward_passes_within_a_training_step(kind, activations, precision):
    """The step's own backward, which Lightning runs later, is still to come: the weights that it needs stay."""
    assert_same_training(kind, arguments=lambda: {"precision": precision}, activations=activations)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "sync_batchnorm": True},
        {"overfit_batches": 2, "inference_mode": False},
        {"fast_dev_run": True},
        {"num_sanity_val_steps": 2, "val_check_interval": 2, "profiler": "advanced"},
        {"detect_anomaly": True, "max_steps": 5, "max_epochs": -1},
    ],
    ids=str,
)
def test_trainer_arguments(arguments):
    assert_same_training(arguments=lambda: arguments)


class HasUnused(Base):
    """Weights that live on the device, as they cannot be moved, and never have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Embedding(2, 3, sparse=True)


def test_clipping_by_value_what_streams_alone():
    assert_same_training(HasUnused, arguments=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})


def evaluate(ours: L.Trainer, module: Base) -> Any:
    metrics = [ours.validate(module, loader(2), verbose=False), ours.test(module, loader(2), verbose=False)]
    return [metrics, ours.predict(module, loader(2))]


def everything_in_a_row(ours: L.Trainer, module: Base) -> Any:
    """With one trainer: each entry point sets up and tears down."""
    fit(ours, module)
    assert_plain(module)
    ours.validate(module, loader(2), verbose=False)
    ours.test(module, loader(2), verbose=False)
    ours.fit_loop.max_epochs = 3
    fit(ours, module)
    return ours.predict(module, loader(2))


def another_module_with_the_same_trainer(ours: L.Trainer, module: Base) -> Any:
    other = Base(blocks=2)
    ours.validate(other, loader(2), verbose=False)
    fit(ours, module)
    predictions = ours.predict(other, loader(2))
    assert_plain(other)
    return predictions


def under_another_trainer(ours: L.Trainer, module: Base) -> Any:
    fit(ours, module)
    return trainer(plain()).predict(module, loader(2))


@pytest.mark.parametrize(
    "drive", [evaluate, everything_in_a_row, another_module_with_the_same_trainer, under_another_trainer]
)
def test_entry_points(drive):
    assert_same_training(drive=drive)


def test_learning_rate_finder():
    class Rated(Base):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def drive(trainer: L.Trainer, module: Rated) -> Any:
        found = Tuner(trainer).lr_find(module, loader(), num_training=6)
        fit(trainer, module)
        return torch.tensor(found.suggestion() or 0.0)

    assert_same_training(Rated, drive)


class Delink(L.Callback):
    """Has all blocks share the weights of the first, and after some steps gives each its own copy of them."""

    def setup(self, trainer: L.Trainer, pl_module: Base, stage: str) -> None:
        for block in pl_module.blocks[1:]:
            block.load_state_dict(pl_module.blocks[0].state_dict(keep_vars=True), assign=True)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Base, *_: Any) -> None:
        if trainer.global_step != 4:
            return
        first = pl_module.blocks[0]
        for block in pl_module.blocks[1:]:
            weights = {name: value.clone() for name, value in first.state_dict().items()}
            block.load_state_dict(weights, assign=True)
        (optimizer,) = trainer.optimizers
        for parameter in first.parameters():
            optimizer.state.pop(parameter, None)  # it describes the sum of the gradients of all blocks
        optimizer.param_groups[0]["params"] = list(pl_module.parameters())


CALLBACKS: dict[str, Callable[[], Any]] = {
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, device="cpu"),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
    "EarlyStopping": lambda: callbacks.EarlyStopping("val_loss", patience=0),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False),
    "ModelPruning as on a GPU": lambda: pruning_as_on_a_gpu(),
    "weights that are shared at first": Delink,
}
if hasattr(callbacks, "WeightAveraging"):  # not in Lightning 2.5
    CALLBACKS["EMAWeightAveraging"] = lambda: callbacks.EMAWeightAveraging(decay=0.5, device="cpu")


def pruning_as_on_a_gpu():
    """With the default, by which weights are reset to copies of the originals; on the CPU, to the originals."""
    callback = callbacks.ModelPruning("l1_unstructured", amount=0.5)
    copy_pruned_originals(SimpleNamespace(callbacks=[callback]), SuperpipelineStrategy.lightning)
    return callback


def test_pruning_trains_the_originals_on_the_cpu():
    """As plain training does there: they are what weights were reset to."""
    traces = []
    for strategy in (plain(), streamed()):
        pruning = callbacks.ModelPruning("l1_unstructured", amount=0.5)
        traces.append(run(strategy, Base, fit, lambda pruning=pruning: {"callbacks": pruning, "max_epochs": 5}))
    assert_same_trace(*traces)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name):
    assert_same_training(arguments=lambda: {"callbacks": CALLBACKS[name](), "max_epochs": 5})


@pytest.mark.parametrize("arguments", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 4}], ids=str)
def test_swa_steps_once_more_with_the_last_gradients(arguments):
    """Its epoch for BatchNorm ends with a step, before which only a validation would zero gradients."""
    swa = CALLBACKS["StochasticWeightAveraging"]
    assert_same_training(arguments=lambda: {"callbacks": swa(), "max_epochs": 3, "limit_val_batches": 0, **arguments})


def test_a_compiled_lightning_module():
    """Hazard 25: Lightning has a list of strategies that may run one, and ours is a strategy for a single device."""

    class Compiled(Base):
        def note(self, label, value):  # would be compiled for each step anew
            pass

    def run(strategy):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Compiled()
        compiled = torch.compile(module, backend="eager")
        it = trainer(strategy, max_epochs=1)
        it.fit(compiled, loader(3), loader(1))
        return [it.callback_metrics, dict(module.named_parameters()), it.predict(compiled, loader(1))]

    torch.testing.assert_close(run(streamed()), run(plain()), rtol=0, atol=0)
