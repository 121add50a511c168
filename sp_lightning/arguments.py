"""The common part of the strategies of the Trainer and of Fabric: their names in Lightning, and their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.constants import default_pg_timeout

from sp_lightning.pipeline.options import (
    ActivationPolicy,
    Auto,
    CompileOptions,
    OptimizerPlace,
    PipelineOptions,
    UnitPolicy,
)

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

    from sp_lightning.trainer import FabricNamespace

_SET_BY_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "precision", "precision_plugin"}


_ALWAYS_ON_HOST = (
    "weights are always in CPU memory, and so is optimizer state unless `memory_budget` has room for it (see "
    "`optimizer_on`)"
)
_OF_OTHERS = {
    "auto_wrap_policy": "`units` names the layers that stream; by default they are found",
    "activation_checkpointing": "use `activations='recompute'`",
    "activation_checkpointing_policy": "use `activations='recompute'`",
    "cpu_offload": _ALWAYS_ON_HOST,
    "offload_optimizer": _ALWAYS_ON_HOST,
    "stage": f"there are no stages: {_ALWAYS_ON_HOST}",
}
"""Arguments of FSDP and DeepSpeed, and their counterparts here."""


def refuse_unknown(taker: str, arguments: Collection[str]) -> None:
    """Answer an unknown argument with ours that does the same, or with the names that there are."""
    if arguments:
        name = min(arguments)
        names = [field.name for field in fields(PipelineOptions)]
        hint = f": {_OF_OTHERS[name]}" if name in _OF_OTHERS else ""
        if near := get_close_matches(name, names, n=1, cutoff=0.8):
            hint = f", but {near[0]!r}"
        raise TypeError(f"{taker} has no argument {name!r}{hint}. Its options are {', '.join(names)}.")


def options_among(arguments: Mapping[str, Any]) -> PipelineOptions:
    """Return the options that are among a function's arguments, its `locals()` when it begins."""
    return PipelineOptions(**{field.name: arguments[field.name] for field in fields(PipelineOptions)})


class StrategyWithOptions:
    """A strategy that can be named, `strategy="superpipeline"`; its options are the pipeline's."""

    strategy_name = "superpipeline"
    lightning: ClassVar[FabricNamespace]
    used_by: ClassVar[str]
    """The class that takes it as an argument: the Trainer, or Fabric."""

    def __init__(
        self,
        *,
        k: int | Auto = "auto",
        k_prime: int = 1,
        memory_budget: int | float | str | None = None,
        units: UnitPolicy | None = None,
        resident: Sequence[str] = (),
        activations: ActivationPolicy = "auto",
        overlap_optimizer: bool | Auto = "auto",
        optimizer_on: OptimizerPlace = "auto",
        pin_memory: bool = True,
        host_threads: int | Auto = "auto",
        compile: CompileOptions = False,
        nvme_path: str | None = None,
        debug: bool = False,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **set_by_lightning: Any,
    ) -> None:
        self.options = options_among(locals())
        refuse_unknown(type(self).__name__, set_by_lightning.keys() - _SET_BY_LIGHTNING)
        super().__init__(checkpoint_io=checkpoint_io, **set_by_lightning)  # type: ignore[call-arg]
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self._make_parts()

    def _make_parts(self) -> None:
        """Make the parts of a strategy besides its arguments."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Name the strategy: Lightning's errors about a strategy that it does not know contain this."""
        owner = f"{self.used_by} of {self.lightning.name}"
        return f"<{type(self).__name__} for the {owner} alone; strategy={self.strategy_name!r} works everywhere>"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name, unless it already is: Lightning refuses to register a name twice."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)


# Python's own errors name it
StrategyWithOptions.__init__.__qualname__ = "SuperpipelineStrategy.__init__"
