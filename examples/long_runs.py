"""Runs that take hours: a learning rate that rises and falls, and data that continue where they stopped.

All else is Lightning's own, and `recipe.py` has its options: ModelCheckpoint, `ckpt_path`, loggers, clipping,
accumulation. A run that was killed and resumed has the numbers of one that was not, to the last bit on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from typing import Any, Literal, TypedDict

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def for_trainer(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the Trainer that all recipes have in common."""
    arguments: dict[str, Any] = {
        "accelerator": options.accelerator,
        "devices": options.devices,
        "precision": options.precision,
        "gradient_clip_val": options.clip,
        "accumulate_grad_batches": options.accumulate,
        "logger": logs(options.output),
        "log_every_n_steps": options.log_every,
        "enable_checkpointing": options.save_every is not None,
        "enable_model_summary": False,
    }
    if options.eval_every is not None:
        arguments |= {"val_check_interval": options.eval_every, "check_val_every_n_epoch": None}
    return arguments


def logs(folder: str) -> list[Logger]:
    """Return a log in CSV, and one for TensorBoard where that is installed, side by side in a folder of this run."""
    log = CSVLogger(folder, "logs")
    if importlib.util.find_spec("tensorboard") is None:
        return [log]
    return [log, TensorBoardLogger(folder, "logs", log.version)]


class RandomState(TypedDict):
    """Where torch's random numbers are, on the host and on the GPU, if there is one."""

    host: Tensor
    gpu: Tensor | None


class LoaderState(TypedDict):
    """Where a loader is in an epoch, and the random numbers when that began and now."""

    taken: int
    begun: RandomState
    now: RandomState


class Schedule(L.Callback):
    """Moves the learning rate: up in the first steps, and then, with `"cosine"`, down to zero at the end.

    All follows from the number of the step, so there is nothing to save.

    Args:
        kind: `"constant"` or `"cosine"`.
        warmup: Number of steps until the optimizer's own learning rate is reached.

    """

    def __init__(self, kind: Literal["constant", "cosine"] = "cosine", warmup: int = 0) -> None:
        self.kind = kind
        self.warmup = warmup

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look how many steps there will be."""
        self.steps = trainer.estimated_stepping_batches

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Set the learning rate of this step."""
        for group in [group for optimizer in trainer.optimizers for group in optimizer.param_groups]:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.part(trainer.global_step)

    def part(self, step: int) -> float:
        """Return the part of the optimizer's learning rate that a step takes; the first is number 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return 1.0
        return (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup))) / 2


class Loader(DataLoader[Any]):
    """A DataLoader that goes on in the middle of an epoch, with the rest of its order and the same random numbers.

    Lightning saves its state in checkpoints. An order is drawn when an epoch begins: the random numbers of that moment
    draw it again, and those of the moment of the checkpoint follow when the batches before it have gone by.
    """

    begun: RandomState | None = None
    taken = 0
    loaded: LoaderState | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or what is left of it."""
        loaded, self.loaded = self.loaded, None
        self.taken = loaded["taken"] % len(self) if loaded else 0  # zero as well after an epoch's last step
        if loaded:
            set_random_state(loaded["begun"] if self.taken else loaded["now"])
        self.begun = random_state()
        batches = super().__iter__()
        if loaded and self.taken:
            for _ in range(self.taken):
                next(batches)
            set_random_state(loaded["now"])
        for batch in batches:
            self.taken += 1
            yield batch

    def state_dict(self) -> LoaderState:
        """Return how far this epoch is, and the random numbers at its beginning and now."""
        now = random_state()
        return {"taken": self.taken, "begun": self.begun or now, "now": now}

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on from there when batches are asked for."""
        self.loaded = state


def for_validation(dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    """Return a loader that draws none of training's random numbers: a resumed run may leave out a validation."""
    return DataLoader(dataset, batch_size, generator=torch.Generator(), **options)


def random_state() -> RandomState:
    """Return where torch's random numbers are."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"host": torch.get_rng_state(), "gpu": gpu}


def set_random_state(state: RandomState) -> None:
    """Let torch's random numbers go on from there."""
    torch.set_rng_state(state["host"])
    if state["gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["gpu"])
