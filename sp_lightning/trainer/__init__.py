"""The strategy's work for a Trainer, in parts: its steps, processes, precision, checkpoints, and its refusals.

This file has everything that they use from Lightning, once per namespace. `lightning.pytorch` and `pytorch_lightning`
ship the same code twice: registries, base classes and exceptions of one are unknown to the other. The shared
implementation therefore gets the names that it needs from a `Namespace`. It also gathers private names of Lightning,
each with the reason why it is needed, so that a change in Lightning is followed up in one place.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from sp_lightning.pipeline import Pipeline

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = object


class FabricNamespace:
    """The names of `lightning.fabric` or `lightning_fabric` that the shared implementation uses.

    Args:
        name: The namespace.
        below: The namespace that it is built on, which has its utilities; None if it has its own.
    """

    # Private. Wrappers such as `AsyncCheckpointIO` ask the strategy for the plugin to wrap; Fabric has none.
    wrapping_checkpoint_io: type[Any] | tuple[()] = ()

    def __init__(self, name: str, below: str | None = None) -> None:
        self.name = name
        utilities = f"{below or name}.utilities"
        self.misconfiguration = resolve_name(f"{utilities}.exceptions:MisconfigurationException")
        self.rank_zero_only = resolve_name(f"{utilities}.rank_zero:rank_zero_only")
        self.info = resolve_name(f"{utilities}.rank_zero:rank_zero_info")
        self.warn = resolve_name(f"{utilities}.rank_zero:rank_zero_warn")
        self.reset_seed = resolve_name(f"{utilities}.seed:reset_seed")
        # Private. Joins the other processes at the cluster environment's address.
        self.init_process_group = resolve_name(f"{utilities}.distributed:_init_dist_connection")
        # Private. The reduction behind `self.log(sync_dist=True)` and `fabric.all_reduce`.
        self.reduce = resolve_name(f"{utilities}.distributed:_sync_ddp_if_available")
        # Private. The function with which both `ParallelStrategy`s gather.
        self.all_gather = resolve_name(f"{utilities}.distributed:_all_gather_ddp_if_available")
        # Private. Starts the user's script once more for each further device; the Trainer's knows the Trainer.
        self.script_launcher = resolve_name(f"{name}.strategies.launchers:_SubprocessScriptLauncher")
        plugins = import_module(f"{name}.plugins")
        # Precision plugins that convert modules to other dtypes, and do no more; the base class is that of `32-true`.
        self.converting_dtypes = (plugins.HalfPrecision, plugins.DoublePrecision)
        self.precision = plugins.Precision
        self.mixed_precision = plugins.MixedPrecision

    def check(self, condition: bool, message: str) -> None:
        """Raise `MisconfigurationException` with `message` unless `condition` holds."""
        if not condition:
            raise self.misconfiguration(message)


class Namespace(FabricNamespace):
    """The names of `lightning.pytorch` or `pytorch_lightning` that the shared implementation uses."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric")
        callbacks = import_module(f"{name}.callbacks")
        self.summary = callbacks.ModelSummary
        self.lambda_callback = callbacks.LambdaCallback
        # Private: their `_device`. They keep a second copy of the model, on the device unless told otherwise.
        # `WeightAveraging` (and `EMAWeightAveraging`, a subclass) came with Lightning 2.6.
        self.swa = callbacks.StochasticWeightAveraging
        self.averaging = (self.swa, getattr(callbacks, "WeightAveraging", self.swa))
        # Private: its `_copy_param`. It resets weights to originals that it has saved before training.
        self.pruning = callbacks.ModelPruning
        # Private. The closure that automatic optimization passes to an optimizer; it contains no user code.
        self.closure = resolve_name(f"{name}.loops.optimization.automatic:Closure")
        self.wrapping_checkpoint_io = resolve_name(f"{name}.plugins.io.wrapper:_WrappingCheckpointIO")


def is_fitting(trainer: Trainer) -> bool:
    """Tell whether the Trainer trains, and does not only validate, test or predict."""
    return trainer.state.fn == "fit"


def logs_now(trainer: Any) -> bool:
    """Private. Tell whether Lightning writes to its loggers after this batch; its own monitors use this."""
    return bool(trainer._logger_connector.should_update_logs)


def logged_step(trainer: Any) -> int:
    """Private. Return the step under which Lightning logs: unlike `global_step`, it does not count each optimizer."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


class StrategyPart(ParallelStrategy):
    """The common base of the strategy's parts; each namespace puts its own `ParallelStrategy` below them."""

    lightning: ClassVar[Namespace]
    pipeline: Pipeline | None  # while a module that has parameters is attached

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
