"""Everything that the adaptor uses from Lightning, once per namespace.

`lightning.pytorch` and `pytorch_lightning` ship the same code twice: registries, base classes and exceptions of one
are unknown to the other. The shared implementation therefore gets what it needs from a `Namespace`. Private names of
Lightning are gathered here, each with the reason why it is needed, so that a change in Lightning is followed up in one
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""The two namespaces, each with its Fabric package."""


@dataclass(frozen=True)
class Namespace:
    """The names of one namespace that the shared implementation uses.

    Attributes:
        name: The import path of the namespace.
        misconfiguration: Its `MisconfigurationException`.
        fitting: The value of `trainer.state.fn` while `fit` runs.
        precisions: Precision plugins whose weights are plain tensors and may be on any device.
        precision: The base class of all precision plugins, which is also the plugin of `32-true`.
        mixed_precision: The plugin of `16-mixed` and `bf16-mixed`.
        rich: The callbacks that print with rich; if one is present, so do we.
        summary: The callback that prints the model summary.
        averaging: The callbacks that keep a second copy of the model, on the device unless told otherwise.
        pruning: The callback that prunes weights between epochs.
        closure: Private. The closure that automatic optimization passes to an optimizer; it contains no user code.
        wrapping_checkpoint_io: Private. Wrappers such as `AsyncCheckpointIO` ask the strategy for the plugin to wrap.
        update_properties: Private. Sets `LightningModule.device` without moving a weight.
        empty_init: Private. The mode behind `trainer.init_module(empty_init=True)`.
        script_launcher: Private. Starts the user's script once more for each further device.
        init_process_group: Private. Joins the other processes at the cluster environment's address.
        reset_seed: Gives all processes the same seed, if one is set.
        reduce: Private. The reduction behind `self.log(sync_dist=True)`.
        rank_zero_only: Holds the rank that decides which process logs and warns.
        info: Logs on rank zero.
        warn: Warns on rank zero.
    """

    name: str
    misconfiguration: type[Exception]
    fitting: Any
    precisions: tuple[type, ...]
    precision: Any
    mixed_precision: Any
    rich: tuple[type, ...]
    summary: type
    averaging: tuple[type, ...]
    pruning: type
    closure: type
    wrapping_checkpoint_io: type
    update_properties: Callable[..., None]
    empty_init: Callable[..., Any]
    script_launcher: Callable[..., Any]
    init_process_group: Callable[..., None]
    reset_seed: Callable[[], None]
    reduce: Callable[..., Any]
    rank_zero_only: Any
    info: Callable[..., None]
    warn: Callable[..., None]

    @staticmethod
    def logged(module: Any) -> list[Any]:
        """Private. Return the collection in which `self.log` keeps values, if a loop is running."""
        results = None if module._trainer is None else module._trainer._results
        return [] if results is None else [results]

    @staticmethod
    @contextmanager
    def in_hook(module: Any, name: str) -> Iterator[None]:
        """Private. Run code as if in Lightning's hook of this name, which decides how `self.log` behaves."""
        before, module._current_fx_name = module._current_fx_name, name
        try:
            yield
        finally:
            module._current_fx_name = before

    def check(self, condition: bool, message: str) -> None:
        """Raise `MisconfigurationException` with `message` unless `condition` holds."""
        if not condition:
            raise self.misconfiguration(message)


def logs_now(trainer: Any) -> bool:
    """Private. Tell whether Lightning writes to its loggers after this batch; its own monitors use this."""
    return bool(trainer._logger_connector.should_update_logs)


def is_tuning(trainer: Any) -> bool:
    """Private. Tell whether a `Tuner` runs the Trainer: its callback ends the fit before it begins."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


def logged_step(trainer: Any) -> int:
    """Private. Return the step under which Lightning logs: unlike `global_step`, it does not count each optimizer."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


@cache
def namespace(name: str) -> Namespace:
    """Return what the adaptor uses from `lightning.pytorch` or `pytorch_lightning`."""
    fabric = FABRIC[name]
    plugins = import_module(f"{name}.plugins")
    callbacks = import_module(f"{name}.callbacks")
    rank_zero = import_module(f"{name}.utilities.rank_zero")
    distributed = import_module(f"{fabric}.utilities.distributed")
    # `WeightAveraging` (and `EMAWeightAveraging`, a subclass) came with Lightning 2.6.
    averaging = (getattr(callbacks, name, None) for name in ("StochasticWeightAveraging", "WeightAveraging"))
    return Namespace(
        name=name,
        misconfiguration=import_module(f"{name}.utilities.exceptions").MisconfigurationException,
        fitting=import_module(f"{name}.trainer.states").TrainerFn.FITTING,
        precisions=(plugins.HalfPrecision, plugins.DoublePrecision, plugins.MixedPrecision),
        precision=plugins.Precision,
        mixed_precision=plugins.MixedPrecision,
        rich=(callbacks.RichModelSummary, callbacks.RichProgressBar),
        summary=callbacks.ModelSummary,
        averaging=tuple(cls for cls in averaging if cls is not None),
        pruning=callbacks.ModelPruning,
        closure=import_module(f"{name}.loops.optimization.automatic").Closure,
        wrapping_checkpoint_io=import_module(f"{name}.plugins.io.wrapper")._WrappingCheckpointIO,
        update_properties=import_module(f"{fabric}.utilities.device_dtype_mixin")._update_properties,
        empty_init=import_module(f"{fabric}.utilities.init")._EmptyInit,
        script_launcher=import_module(f"{name}.strategies.launchers")._SubprocessScriptLauncher,
        init_process_group=distributed._init_dist_connection,
        reset_seed=import_module(f"{fabric}.utilities.seed").reset_seed,
        reduce=distributed._sync_ddp_if_available,
        rank_zero_only=rank_zero.rank_zero_only,
        info=rank_zero.rank_zero_info,
        warn=rank_zero.rank_zero_warn,
    )
