"""What recipes have in common once model and data are there: the Trainer, how a run goes, and where its results are."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import recipe
import torch
from long_runs import for_trainer

import sp_lightning

FIRST_STEPS = 4  # before a run says how long it takes

RESULTS = {"save": "model", "save_adapters": "adapters"}
"""Options that name where a result goes, and what it is."""


class Pace(L.Callback):
    """Says how a run goes: in the bar, or in a line every some steps where there is no terminal, as in a log file.

    Args:
        count: Returns how much is in a batch.
        unit: What it counts.
        every: Steps from one line to the next.
        announces: Whether to say at the start how many steps there are, and soon how long they take.

    """

    def __init__(
        self, count: Callable[[Any], int], unit: str = "tokens", every: int = 10, announces: bool = False
    ) -> None:
        self.count = count
        self.unit = unit
        self.every = every
        self.announces = announces
        self.done = 0  # of the unit, since the last line

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, and look how many steps there will be."""
        self.in_all = trainer.estimated_stepping_batches
        self.step = self.first = trainer.global_step
        self.begin = self.since = time.perf_counter()
        group = trainer.optimizers[0].param_groups[0]
        for logger in trainer.loggers:  # what was used, also if the model chose it
            logger.log_hyperparams({"lr": group.get("initial_lr", group["lr"])})
        if self.announces and isinstance(self.in_all, int):
            left = f", {self.in_all - self.first:,} of them left" if self.first else ""
            recipe.say(f"{self.in_all:,} steps{left}; --steps or --epochs takes another number", flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count what was in the batch, and say how the run goes if a line is due."""
        self.done += self.count(batch) * trainer.world_size
        step = trainer.global_step
        if self.announces and step > self.first + FIRST_STEPS:
            self.announces = False
            recipe.say(f"Step {step}{self.time_left(step, time.perf_counter())}", flush=True)
        if step < self.step + self.every:
            return
        now = time.perf_counter()
        speed = self.done / max(now - self.since, 1e-9)
        self.step, self.since, self.done = step, now, 0
        gib = round(memory_in_use() / 2**30, 1)
        figures = {f"{self.unit}/s": float(round(speed)), "GiB": gib}
        pl_module.log_dict(figures, prog_bar=True, batch_size=1)
        if not sys.stdout.isatty():
            left = self.time_left(step, now)
            loss = float(outputs["loss"])
            where = "GPU" if torch.cuda.is_available() else "RAM"
            of_all = f"/{self.in_all}" if isinstance(self.in_all, int) else ""
            line = f"Step {step}{of_all}: loss {loss:.4f}, {speed:,.0f} {self.unit}/s"
            recipe.say(f"{line}, {gib:.1f} GiB of {where}{left}", flush=True)

    def time_left(self, step: int, now: float) -> str:
        """Return how long the run still takes, validation included, as the rest of a line."""
        if not isinstance(self.in_all, int) or step == self.first:
            return ""
        seconds = (now - self.begin) / (step - self.first) * (self.in_all - step)
        return f", {readable(seconds)} left"


class Accuracy(L.Callback):
    """Says how often validation found a right answer, before training and after it.

    Args:
        what: What the share is of.

    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.shares: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the share, and say it unless it comes before all steps."""
        self.shares.append(trainer.callback_metrics["val_accuracy"].item())
        if not trainer.sanity_checking:
            recipe.say(f"\n{recipe.moment(trainer)}: {self.what} {self.shares[-1]:.0%}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how it has changed."""
        recipe.say(f"{self.what}: before {self.shares[0]:.0%}, after {self.shares[-1]:.0%}")


def readable(seconds: float) -> str:
    """Return a time as one reads it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def memory_in_use() -> int:
    """Return the most memory that was in use: the GPU's if there is one, or else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def begin(options: argparse.Namespace) -> None:
    """Begin a recipe, before a model is loaded: with the user's data, and a word if it would leave no model."""
    if options.missing is not None:
        toy = f"--model {options.model} would learn from a toy data set"
        sys.exit(f"error: --{options.missing} is missing: without it, {toy}")
    L.seed_everything(options.seed, verbose=False)
    able = [name for name in (*RESULTS, "save_every") if hasattr(options, name)]
    if not any(getattr(options, name) for name in (*able, "saves") if hasattr(options, name)):
        arguments = " or ".join("--" + name.replace("_", "-") for name in able)
        recipe.say(f"This run saves no model: add {arguments} to keep what it learns")


def train(
    options: argparse.Namespace,
    module: L.LightningModule,
    data: L.LightningDataModule,
    *,
    callbacks: Iterable[L.Callback],
    pace: Pace,
    save: Callable[[L.Trainer], None],
    **arguments: Any,
) -> L.Trainer:
    """Train, save what was asked for, and say how the loss fell and where the results are.

    Args:
        options: The recipe's, which are written to its log.
        module: What is trained.
        data: What it learns from.
        callbacks: The recipe's own.
        pace: Says how the run goes.
        save: Writes the results, in the first process alone.
        arguments: The recipe's arguments of the Trainer.

    """
    losses = recipe.Losses()
    pace.every, pace.announces = options.log_every, options.is_pretrained
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        callbacks=[losses, *callbacks, *options.callbacks, pace],
        **{**for_trainer(options), **arguments},
    )
    ours = sp_lightning.__version__
    for logger in trainer.loggers:
        logger.log_hyperparams({**options.given, "versions": f"sp_lightning {ours}, torch {torch.__version__}"})
    recipe.fit(trainer, module, data, ckpt_path=options.resume)
    if options.resume is not None and not losses.values:
        ended = f"This run has ended at step {trainer.global_step:,}, and no step was trained"
        recipe.say(f"{ended}: --no-resume begins again, and more --epochs or --steps with --resume continue it")
    save(trainer)
    recipe.say(losses)
    say_where(options, trainer)
    return trainer


def save_checkpoint(options: argparse.Namespace, trainer: L.Trainer) -> None:
    """Write a checkpoint if `--save` asks for one."""
    if options.save is not None:
        trainer.save_checkpoint(options.save)


def say_where(options: argparse.Namespace, trainer: L.Trainer) -> None:
    """Say where the results are."""
    places = [f"{what} in {getattr(options, name)}" for name, what in RESULTS.items() if getattr(options, name, None)]
    checkpoints = Path(options.output, "checkpoints")
    kept = [name for name in ("last", "best") if options.saves and Path(checkpoints, f"{name}.ckpt").is_file()]
    if kept:
        places.append(f"checkpoints in {checkpoints} ({' and '.join(f'{name}.ckpt' for name in kept)})")
    folder = next((logger.log_dir for logger in trainer.loggers), None)
    if folder is not None:
        places.append(f"log and options in {folder}")
    text = "; ".join(places)
    recipe.say(text[:1].upper() + text[1:])
