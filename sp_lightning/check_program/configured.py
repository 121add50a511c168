"""The user's program, as LightningCLI understands its configuration: built once more for each run."""

from __future__ import annotations

import argparse
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch

from sp_lightning.callback import CallbackMixin
from sp_lightning.check_program.observer import Observer
from sp_lightning.check_program.ways import PlacedStrategy, Way
from sp_lightning.lightning_cli import STRATEGIES, arguments_of_cli, command_line
from sp_lightning.pipeline import PipelineOptions
from sp_lightning.strategy import SuperpipelineMixin

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


class ConfiguredProgram:
    """A LightningModule, its data and its Trainer, from the arguments of `sp-lightning fit`.

    The Trainer keeps its precision, clipping, accumulation and callbacks, and is cut to a few steps (`fast_dev_run`, so
    that nothing is logged or saved).

    Args:
        namespace: The namespace of the LightningModule.
        arguments: The command line.
        device: The device to compute on.
        steps: Number of optimizer steps, if there is data for as many.

    Raises:
        argparse.ArgumentError: If the arguments describe no program.
    """

    def __init__(
        self,
        namespace: str,
        arguments: Sequence[str],
        device: torch.device,
        steps: int,
    ) -> None:
        self._namespace = namespace
        self._on_device = {
            "accelerator": "cpu" if device.type == "cpu" else "gpu",
            "devices": 1 if device.type == "cpu" else [device.index or 0],
            "num_nodes": 1,
        }
        command_line_class = _cli_that_builds(command_line(namespace), self._on_device)
        with _quiet():
            self._cli = command_line_class(args=["fit", *arguments], **arguments_of_cli(namespace))
        asked = self._cli.config_init["fit"]["trainer"]
        self._batches = steps * (asked.get("accumulate_grad_batches") or 1)
        seed = self._cli.config["fit"]["seed_everything"]
        self._seed = seed if type(seed) is int else 0  # True asks for a random one
        strategy = asked.get("strategy")
        ours = isinstance(strategy, SuperpipelineMixin)
        self.options: PipelineOptions = strategy.options if ours else PipelineOptions()
        self._strategy_class = resolve_name(STRATEGIES[namespace])
        self.misconfiguration: type[Exception] = self._strategy_class.lightning.misconfiguration
        model = self._cli.model
        self.name = type(model).__name__
        is_overridden = resolve_name(f"{namespace}.utilities.model_helpers:is_overridden")
        if self._cli.datamodule is None and not is_overridden("train_dataloader", model):
            raise argparse.ArgumentError(
                None,
                f"{self.name} has no training data. Add `--data CLASS`, a LightningDataModule, "
                f"or define `train_dataloader` in {self.name}",
            )
        self._release()

    def train(self, observer: Observer, way: Way | None, reads_gradients: bool) -> None:
        """Train the program, plainly if there is no way to stream it."""
        cli = self._cli
        strategy: Any = "auto"
        if way is not None:
            placed = {"way": way, "reads_gradients": reads_gradients}
            bases = (PlacedStrategy, self._strategy_class)
            strategy = type("PlacedStrategy", bases, placed)(**vars(way.options))
        cli.given = {"strategy": strategy, "fast_dev_run": self._batches, **self._on_device}
        with _quiet():
            import_module(self._namespace).seed_everything(self._seed, workers=True, verbose=False)
            cli.instantiate_classes()
            trainer = cli.trainer
            callbacks = import_module(f"{self._namespace}.callbacks")
            shown = (callbacks.ProgressBar, callbacks.ModelSummary, CallbackMixin)
            kept = [callback for callback in trainer.callbacks if not isinstance(callback, shown)]
            observing = callbacks.LambdaCallback(
                on_train_batch_start=observer.on_train_batch_start,
                on_before_optimizer_step=observer.on_before_optimizer_step,
                on_train_batch_end=observer.on_train_batch_end,
                on_train_end=observer.on_train_end,
            )
            trainer.callbacks = [*kept, observing]
            try:
                trainer.fit(cli.model, datamodule=cli.datamodule)
            finally:
                self._release()

    def _release(self) -> None:
        """Let go of all built objects: the next run needs the memory."""
        cli = self._cli
        cli.model = cli.datamodule = cli.trainer = cli.config_init = None


def _cli_that_builds(base: Any, on_device: dict[str, Any]) -> Any:
    """Return a class of LightningCLI that builds the configured objects, and runs nothing by itself."""

    class BuildingCLI(base):  # type: ignore[misc]
        # arguments of the Trainer that win over those of the configuration
        given = {"strategy": "auto", "fast_dev_run": True, **on_device}

        def instantiate_trainer(self, **arguments: Any) -> Any:
            return super().instantiate_trainer(**arguments, **self.given)

        def fit(self, **_: Any) -> None:
            """Do nothing: LightningCLI calls this once it has built everything."""

    return BuildingCLI


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what programs and Lightning print, for a program runs two dozen times."""
    with ExitStack() as restored, warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
