"""Runs that take hours: a learning rate that rises and falls, and data that continue where they stopped.

All else is Lightning's own, and `recipe.py` has its options: ModelCheckpoint, `ckpt_path`, loggers, clipping,
accumulation. A run that was killed and resumed has the numbers of one that was not, to the last bit on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypedDict

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sp_lightning import Assumptions

say = rank_zero_only(print)  # with several devices, the script runs once per device


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
        "enable_checkpointing": options.saves,
        "enable_model_summary": False,
    }
    if options.eval_every is not None:
        arguments |= {"val_check_interval": options.eval_every, "check_val_every_n_epoch": None}
    return arguments


def prepare_long_run(options: argparse.Namespace, data: str | None, best: tuple[str, str] | None) -> None:
    """Add the callbacks of a long run, and find its folder and its checkpoint."""
    path = getattr(options, data, None) if data else None
    run = {**options.given, "data": None if path is None else Path(path).stat().st_size}
    continues = options.is_pretrained if options.resume is None else options.resume
    last = find_last(options, run if options.resume is None and options.is_pretrained else None)
    options.output = options.given["output"] = str(last.parents[1])
    if options.schedule != "constant" or options.warmup:
        options.callbacks += [Schedule(options.schedule, options.warmup), LearningRateMonitor("step")]
    options.saves = options.save_every is not None or options.is_pretrained
    if options.saves:
        options.callbacks.append(LastCheckpoint(last.parent, options.save_every, run))
    if options.saves and best is not None:
        metric, mode = best
        kept = {"save_weights_only": True, "enable_version_counter": False}
        options.callbacks.append(ModelCheckpoint(last.parent, "best", monitor=metric, mode=mode, **kept))
    if continues and last.is_file():
        say(f"Continuing from {last}")
    elif options.resume:
        say(f"There is no {last} yet: training from the beginning")
    options.resume = str(last) if continues and last.is_file() else None


def find_last(options: argparse.Namespace, run: dict[str, Any] | None) -> Path:
    """Return where the last checkpoint is, or will be: with a run, that of the same command, or of none."""
    folders: Iterable[str] = [options.output or options.usual_output]
    if run is not None and not options.output:
        folders = (options.usual_output + (f"_{number}" if number > 1 else "") for number in count(1))
    for folder in folders:
        last = Path(folder, "checkpoints", "last.ckpt")
        differing = differences(last, run) if run is not None and last.is_file() else []
        if not differing:
            return last
    raise ValueError(
        f"{last} is of a run with other options ({', '.join(differing)}): take another --output, or begin again with "
        "--no-resume, or continue it with --resume"
    )


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


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` every some steps and at the end, in place of the one before, with the options of its run.

    Args:
        folder: Where to write.
        every: Number of steps. `None` is a tenth of the run, but at most 100.
        run: The options, with which `differences` compares those of a later run.

    """

    state_key = "LastCheckpoint"  # whatever `every` is

    def __init__(self, folder: Path, every: int | None, run: dict[str, Any]) -> None:
        super().__init__(folder, "last", every_n_train_steps=every or 1, enable_version_counter=False)
        self.every = every
        self.run = run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look how many steps there will be, and whether the disk has room for checkpoints."""
        super().on_train_start(trainer, pl_module)
        steps = trainer.estimated_stepping_batches
        if self.every is None:
            self._every_n_train_steps = max(1, min(100, steps // 10)) if isinstance(steps, int) else 100
        self.look_for_room(trainer, pl_module)

    def look_for_room(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """End the run if the disk has no room for two checkpoints, as there are while one is written, and the best."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        moments = trainer.optimizers[0].defaults.get("moments")
        optimizer = Assumptions(precision=trainer.precision, moments=moments)
        weights = sum(parameter.nbytes for parameter in trained)
        size = weights + optimizer.state_bytes(trained)
        most = 2 * size + weights * (len(trainer.checkpoint_callbacks) - 1)
        folder = Path(self.dirpath)
        before = sum(file.stat().st_size for file in folder.glob("*.ckpt"))
        folder.mkdir(parents=True, exist_ok=True)
        if most > shutil.disk_usage(folder).free + before:
            each, needed, free = (nbytes / 2**30 for nbytes in (size, most - before, shutil.disk_usage(folder).free))
            sys.exit(
                f"error: a checkpoint takes {each:.1f} GiB, and there are two while one is written. {folder} needs "
                f"{needed:.1f} GiB of disk space, but has {free:.1f} GiB. Free some, or take another --output"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the end of a run, or the same command would take its last steps again."""
        super().on_train_end(trainer, pl_module)
        if trainer.global_step % self._every_n_train_steps:
            trainer.save_checkpoint(Path(self.dirpath, "last.ckpt"))

    def state_dict(self) -> dict[str, Any]:
        """Return what is written into the checkpoint."""
        return {**super().state_dict(), "run": self.run}


# options that a run may change when it goes on
_MAY_DIFFER = (
    *("resume", "output", "log_every", "save_every", "save", "save_adapters", "accelerator"),
    *("strategy", "k", "k_prime", "memory_budget", "activations", "optimizer_on"),
)


def differences(checkpoint: Path, run: dict[str, Any]) -> list[str]:
    """Return the options in which a run differs from that of a checkpoint; of one without options, nothing is known."""
    saved = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["callbacks"]
    written: dict[str, Any] = saved.get(LastCheckpoint.state_key, {}).get("run", {})
    names = [name for name in run if name not in _MAY_DIFFER and written.get(name) != run[name]]
    return ["--" + name.replace("_", "-") for name in names]


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
