"""Random Trainers: what surrounds a model (its class, precision, callbacks, a worker, a teacher) changes no number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
from hypothesis import note
from hypothesis import strategies as st
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer
from torch.utils.data import DataLoader, Dataset

from sp_lightning import SuperpipelineStrategy, optim, superpipeline
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.planning import AutoPlanner

from .class_shapes import SHAPES, shaped
from .drawing import random_programs
from .helpers import ram_is_full
from .lightning_modules import Base, Block, assert_same_training, loader
from .planning.parts import Wanders

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "nadam": partial(NAdam, lr=0.01),
    "asgd": partial(ASGD, lr=0.05),
    "ours": partial(optim.AdamW, lr=0.01),
    "ours, int8": partial(optim.AdamW, lr=0.01, moments="int8"),
    "ours, adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
}
PRECISIONS = ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed"]
HABITS = [None, "state", "called twice", "gradients left", "fails and goes on"]


class Thaw(callbacks.BaseFinetuning):
    """Freezes all but the head, and thaws a block with each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.blocks, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks[-1], optimizer, lr=0.01)


CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "none": L.Callback,
    "thaw": Thaw,
    "swa": partial(callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=1, device="cpu"),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # not in Lightning 2.5
    CALLBACKS["ema"] = partial(callbacks.EMAWeightAveraging, decay=0.5, device="cpu")


class Counts(Block):
    """Changes what it keeps in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        return super().forward(x * (1 + 0.1 * (self.calls[-1] % 3)))


@dataclass(frozen=True)
class Program:
    """All that is random in one run."""

    precision: str
    optimizer: str
    callback: str
    shape: str | None  # of the classes of blocks and of the LightningModule
    manual: bool
    clip: float | None
    accumulate: int
    teacher: str | None  # a second model: towards whose weights these are drawn, or before this one in a row
    is_read: bool  # whether a worker process reads a weight
    activations: ActivationPolicy
    wanders: int  # where units live, from the second step on; below zero, as the planner says
    habit: str | None  # what the user's own code does besides
    drive: float | None  # free bytes of RAM, beyond which optimizer state is on a drive

    @property
    def is_possible(self) -> bool:
        """Whether plain training can do it."""
        if self.callback in ("swa", "ema") and self.shape in ("own_deepcopy", "own_reduce"):
            return False  # these copies lack what `prepare` has added
        if self.teacher == "trained" and (self.callback == "thaw" or self.habit == "gradients left"):
            # Lightning looks for the optimizer's weights in the module. A model that autocast gives other places drops
            # used gradients, and raises an error.
            return False
        if self.drive is not None and not self.optimizer.startswith("ours"):
            return False
        return not (self.optimizer.startswith("ours") and self.precision in ("64-true", "16-true"))

    def block(self) -> nn.Module:
        block = Counts if self.habit == "state" else Block
        return (block if self.shape is None else shaped(block, self.shape))()

    def module(self) -> Base:
        base = LeavesGradients if self.habit == "gradients left" else Module
        module = (base if self.shape is None else shaped(base, self.shape))()
        module.prepare(self)
        return module

    def arguments(self) -> dict[str, Any]:
        made: dict[str, Any] = {"precision": self.precision, "callbacks": [CALLBACKS[self.callback]()]}
        if not self.manual:
            made |= {"gradient_clip_val": self.clip, "accumulate_grad_batches": self.accumulate}
        return made


class Module(Base):
    """Trains as its program says."""

    program: Program

    def __init__(self) -> None:
        super().__init__(blocks=0)

    def prepare(self, program: Program) -> None:
        self.program = program
        self.blocks = nn.ModuleList(program.block() for _ in range(3))
        self.automatic_optimization = not program.manual
        teacher = nn.ModuleList(program.block() for _ in range(3)).requires_grad_(program.teacher == "trained")
        self.teachers = [teacher] if program.teacher else []  # a list: no part of this module

    def loss(self, batch: Any) -> Tensor:
        x, y = batch[0].float(), batch[1]
        for block in self.teachers[0] if self.program.teacher == "trained" else ():
            x = block(x)
        x = x.to(self.head.weight.dtype)
        if self.program.habit == "fails and goes on":
            with suppress(TypeError):
                self.head(self.blocks[0](x), "an argument too many")
        logits = self(x)
        if self.program.habit == "called twice":
            logits = logits + self(x.tanh())
        loss = nn.functional.cross_entropy(logits, y)
        for teacher in self.teachers if self.program.teacher == "frozen" else ():
            pairs = zip(self.blocks.parameters(), teacher.parameters(), strict=True)
            loss = loss + 0.01 * sum((own - other).square().sum() for own, other in pairs)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.program.clip is not None:
            self.clip_gradients(optimizer, self.program.clip, "norm")
        optimizer.step()
        optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Optimizer:
        weights = [*self.parameters(), *(weight for teacher in self.teachers for weight in teacher.parameters())]
        return OPTIMIZERS[self.program.optimizer]([weight for weight in weights if weight.requires_grad])


class LeavesGradients(Module):
    """Has gradients of two steps add up."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


class Looking(Dataset):
    """Reads a weight where the batches are made."""

    def __init__(self, module: Base) -> None:
        self.batches = loader().dataset
        self.module = module

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        x, y = self.batches[index]
        return x + 0 * float(self.module.head.weight.sum()), y


def drive(program: Program, trainer: L.Trainer, module: Module) -> list[Tensor]:
    with ExitStack() as stack:
        if isinstance(trainer.strategy, SuperpipelineStrategy):
            for teacher in module.teachers:
                stack.callback(superpipeline(teacher, "cpu", k=1).detach)
        train = loader()
        if program.is_read:
            train = DataLoader(Looking(module), batch_size=4, num_workers=1, multiprocessing_context="fork")
        trainer.fit(module, train, loader(2))
    return [weight for teacher in module.teachers for weight in teacher.parameters()]


programs = st.builds(
    Program,
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    callback=st.sampled_from(sorted(CALLBACKS)),
    shape=st.sampled_from([None, *sorted(SHAPES)]),
    manual=st.booleans(),
    clip=st.sampled_from([None, 0.1]),
    accumulate=st.integers(1, 2),
    teacher=st.sampled_from([None, "frozen", "trained"]),
    is_read=st.sampled_from([False, False, False, True]),
    activations=st.sampled_from(["keep", "recompute", "offload", "auto"]),
    wanders=st.integers(-1, 999),
    habit=st.sampled_from(HABITS),
    drive=st.sampled_from([None, 0, 50_000]),
)


@random_programs(12, of=2, program=programs.filter(lambda program: program.is_possible))
def test_random_trainers_are_exact(program: Program) -> None:
    """Nothing that surrounds a model changes a number."""
    note(str(program))
    planner = AutoPlanner if program.wanders < 0 else lambda *_: Wanders(program.wanders)
    with mock.patch("sp_lightning.strategy.AutoPlanner", planner), ram_is_full(program.drive or 0):
        options: dict[str, Any] = {"activations": program.activations}
        options |= {} if program.drive is None else {"nvme_path": "."}
        assert_same_training(program.module, partial(drive, program), program.arguments, **options)
