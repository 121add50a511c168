"""LightningModules for the strategy's tests, and the same training under two strategies, written down and compared."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.callback import PREFIX
from sp_lightning.pipeline import Planner, Stats

from .helpers import QUIET, Trace, assert_same_trace, frozen, note_outputs, note_state
from .zoo.blocks import WIDTH as BLOCK_WIDTH
from .zoo.blocks import Chain, Gated
from .zoo.quantized import Int8Weight

WIDTH = 6


class Block(nn.Module):
    """One unit: weights, a running buffer, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.norm(self.up(x)))))


class Base(L.LightningModule):
    """Blocks in a row, trained on random numbers. What a user can see goes into `trace`."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.trace = Trace()
        self.notes: Counter[str] = Counter()

    def note(self, label: str, value: Any) -> None:
        note_outputs(self.trace, f"{label} {self.notes[label]}", value)
        self.notes[label] += 1

    def forward(self, x: Tensor) -> Tensor:
        strategy = self.trainer.strategy
        assert self.device == strategy.root_device
        assert getattr(strategy, "pipeline", True) is not None
        for block in self.path():
            x = block(x)
        return self.head(x)

    def path(self) -> Iterable[nn.Module]:
        """The blocks that a forward calls, in order."""
        return self.blocks

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.note("loss", loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.note("validation loss", loss)
        self.log("val_loss", loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test loss", self.loss(batch))
        self.accuracy(self(batch[0]).argmax(-1), batch[1])
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("gradients", [p.grad for group in optimizer.param_groups for p in group["params"]])
        assert all(p.device.type == "cpu" for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Average(L.Callback):
    """A user's own, which all processes validate with, and which is what training leaves."""

    def on_train_start(self, _: L.Trainer, module: L.LightningModule) -> None:
        self.average = self.weights = [weight.detach().clone() for weight in module.parameters()]

    def on_train_batch_end(self, _: L.Trainer, module: L.LightningModule, *__: Any) -> None:
        for average, weight in zip(self.average, module.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.3)

    def on_validation_epoch_start(self, _: L.Trainer, module: L.LightningModule) -> None:
        self.weights = [weight.detach().clone() for weight in module.parameters()]
        self.write(self.average, module)

    def on_validation_epoch_end(self, _: L.Trainer, module: L.LightningModule) -> None:
        self.write(self.weights, module)

    def on_train_end(self, _: L.Trainer, module: L.LightningModule) -> None:
        self.write(self.average, module)

    def write(self, values: list[Tensor], module: L.LightningModule) -> None:
        for value, weight in zip(values, module.parameters(), strict=True):
            weight.data.copy_(value)


class Adversaries(Base):
    """Manual optimization with two optimizers.

    Without buffers: in manual optimization DDP gives the others those of the first process in the first step alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
        for block in (*self.blocks, *self.critic[:2]):
            block.norm = nn.LayerNorm(2 * WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, judge = self.optimizers()
        x, _ = batch
        made = torch.cat([self(x)] * (WIDTH // 2), 1)
        for optimizer, loss in (
            (judge, lambda: self.critic(x).mean() - self.critic(made.detach()).mean()),
            (generate, lambda: self.critic(made).square().mean()),
        ):
            self.toggle_optimizer(optimizer)
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.note("loss", value)

    def configure_optimizers(self) -> Any:
        ours = [*self.blocks.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(ours, lr=1e-2), torch.optim.SGD(self.critic.parameters(), lr=1e-2)


def loader(count: int = 4, batch_size: int = 4, shuffle: bool = False) -> DataLoader:
    """The same random batches for everyone."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * batch_size, WIDTH, generator=generator)
    y = torch.randint(0, 2, (count * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def plain(**arguments: Any) -> Strategy:
    return SingleDeviceStrategy(device="cpu", **arguments)


def streamed(**arguments: Any) -> Strategy:
    return SuperpipelineStrategy(**{"k": 2, "debug": True, **arguments})


def trainer(strategy: Strategy | str, **arguments: Any) -> L.Trainer:
    """A quiet Trainer on the CPU."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 0, **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(strategy=strategy, **{**defaults, **arguments})


def fit(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.fit(module, loader(), loader(2))


def note_end(module: Base, trainer: L.Trainer) -> Trace:
    """What is left after training: weights, gradients, buffers, optimizer state, metrics, random state."""
    trace = module.trace
    trace["global step"] = trainer.global_step
    for name, parameter in module.named_parameters():
        trace[f"end / weight / {name}"] = frozen(parameter)
    for name, buffer in module.named_buffers():
        trace[f"end / buffer / {name}"] = frozen(buffer)
    for number, optimizer in enumerate(trainer.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                for leaf, tensor in enumerate(tree_leaves(value)):  # LBFGS keeps lists
                    trace[f"end / optimizer {number} / {index} / {key} / {leaf}"] = frozen(tensor)
        groups = [sorted({**group, "params": len(group["params"])}.items()) for group in optimizer.param_groups]
        trace[f"end / optimizer {number} / groups"] = repr(groups)
    for name, value in trainer.callback_metrics.items():
        trace[f"end / metric / {name}"] = frozen(value)
    trace["end / random state"] = torch.get_rng_state()
    return trace


def run(
    strategy: Strategy,
    make: Callable[[], Base],
    drive: Callable[[L.Trainer, Any], Any],
    arguments: Callable[[], dict[str, Any]],
) -> Trace:
    """Build, train and write down, with the same random numbers each time."""
    torch.manual_seed(11)
    module = make()
    ours = trainer(strategy, **arguments())
    torch.manual_seed(12)
    note_outputs(module.trace, "returned", drive(ours, module))
    if isinstance(strategy, SuperpipelineStrategy):
        assert_plain(module)
    return note_end(module, ours)


def assert_same_training(
    make: Callable[[], Base] = Base,
    drive: Callable[[L.Trainer, Any], Any] = fit,
    arguments: Callable[[], dict[str, Any]] = dict,
    **strategy: Any,
) -> Trace:
    """Bit-equality with Lightning's single-device strategy: while the module looks at gradients, and while nobody does.

    Then units may be stepped in backward; and with a budget, as on any GPU, the first steps are measured. No copy is
    late, and nothing is checked meanwhile.

    Args:
        make: Builds the module.
        drive: What is done with it.
        arguments: Builds the Trainer's arguments, as callbacks have state.
        strategy: Arguments of the strategy.
    """
    expected = run(plain(), make, drive, arguments)
    actual = run(streamed(**strategy), make, drive, arguments)
    assert any("loss" in label for label in expected), "nothing was compared"
    assert_same_trace(expected, actual)
    as_users_do = {"k": "auto", "memory_budget": "1GiB", "debug": False}
    with nobody_looks():
        unseen = run(streamed(**{**as_users_do, **strategy}), make, drive, arguments)
    assert_same_trace(
        *({label: trace[label] for label in trace if "gradients" not in label} for trace in (expected, unseen))
    )
    return actual


def nobody_looks() -> AbstractContextManager[Any]:
    """While modules do not look at gradients, which would keep units from being stepped in backward."""
    return mock.patch.object(Base, "on_before_optimizer_step", L.LightningModule.on_before_optimizer_step)


class Placed(L.LightningModule):
    """Six blocks that nobody looks at; a loss that overflows, if that may be."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.model = Chain(Gated() for _ in range(6))
        self.make, self.trace, self.stats = make, Trace(), Stats()

    def on_train_start(self) -> None:
        self.stats = getattr(self.trainer.strategy, "pipeline", self).stats

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).float().square().mean()
        note_outputs(self.trace, f"loss {batch_idx}", loss)
        overflows = batch_idx == 5 and self.trainer.precision == "16-mixed"
        return loss * math.inf if overflows else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def fit_placed(
    make: Callable[[Any], torch.optim.Optimizer],
    planner: Planner | None,
    precision: str,
    clip: float | None = None,
    accumulate: int = 1,
    accelerator: str = "cpu",
    module: type[Placed] = Placed,
) -> tuple[Trace, Stats]:
    """Six steps of blocks with a norm and a scalar, placed as a planner wants, or on a single device without one."""
    strategy: Strategy | str = "auto"
    if planner is not None:
        strategy = SuperpipelineStrategy(k="auto", units=[Gated], debug=accelerator == "cpu")
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # also on the CPU, where the Trainer would take bf16
        device = "cpu" if accelerator == "cpu" else "cuda"
        how = {"plugins": MixedPrecision(precision, device, torch.amp.GradScaler(device, init_scale=2.0**8))}
    torch.manual_seed(1)
    trained = module(make)
    batches = [torch.randn(5, BLOCK_WIDTH) for _ in range(6 * accumulate)]
    how |= {"accelerator": accelerator, "gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=planner):
        ours = trainer(strategy, max_epochs=1, **how)
        ours.fit(trained, DataLoader(batches, batch_size=None))
    note_state(trained.trace, "end", trained, ours.optimizers)
    return trained.trace, trained.stats


class Notes(Logger):
    """Keeps what is logged."""

    name = version = "notes"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args, **kwargs) -> None:
        pass

    def log_metrics(self, metrics, step) -> None:
        self.lines.append((step, dict(metrics)))

    def ours(self) -> list[tuple[int, dict[str, float]]]:
        return [(step, values) for step, values in self.lines if any(name.startswith(PREFIX) for name in values)]


def assert_plain(module: nn.Module) -> None:
    """The module is as its user built it: no class, hook or attribute of ours, and on the CPU."""
    for name, part in module.named_modules():
        assert type(part) is part.__class__, f"{name} is still a gate"
        assert not part._forward_hooks, name
        assert not part._forward_pre_hooks, name
        assert not part._backward_hooks, name
        assert isinstance(vars(part).get("forward", partial(id)), partial), name  # a user's own
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device.type == "cpu", name
        assert type(tensor.data) in (Tensor, Int8Weight), name
