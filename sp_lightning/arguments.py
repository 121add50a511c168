"""What the strategies of the Trainer and of Fabric have in common: their names in Lightning, and their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch.distributed.constants import default_pg_timeout

from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, PipelineOptions, UnitPolicy

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

_SET_BY_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "precision", "precision_plugin"}


def refuse_unknown(taker: str, arguments: Collection[str]) -> None:
    """Answer a misspelled argument with the names that there are."""
    if arguments:
        names = ", ".join(field.name for field in fields(PipelineOptions))
        raise TypeError(f"{taker} has no argument {min(arguments)!r}. Its options are {names}.")


def options_among(arguments: Mapping[str, Any]) -> PipelineOptions:
    """Return the options that are among a function's arguments, its `locals()` when it begins."""
    return PipelineOptions(**{field.name: arguments[field.name] for field in fields(PipelineOptions)})


class StrategyWithOptions:
    """A strategy that can be named: `strategy="superpipeline"`, or a preset's name; its options are the pipeline's."""

    strategy_name = "superpipeline"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "superpipeline_recompute": {"activations": "recompute"},
        "superpipeline_offload": {"activations": "offload"},
    }

    def __init__(
        self,
        *,
        k: int | Literal["auto"] = "auto",
        k_prime: int = 1,
        memory_budget: int | float | str | None = None,
        units: UnitPolicy | None = None,
        resident: Sequence[str] = (),
        activations: ActivationPolicy = "auto",
        overlap_optimizer: bool | Literal["auto"] = "auto",
        optimizer_on: OptimizerPlace = "auto",
        pin_memory: bool = True,
        host_threads: int | Literal["auto"] = "auto",
        compile: bool = False,
        debug: bool = False,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **set_by_lightning: Any,
    ) -> None:
        self.options = options_among(locals())
        refuse_unknown(type(self).__name__, set_by_lightning.keys() - _SET_BY_LIGHTNING)
        parallel_strategy: Any = super()
        parallel_strategy.__init__(checkpoint_io=checkpoint_io, **set_by_lightning)
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self._make_parts()

    def _make_parts(self) -> None:
        """Make what a strategy has beside its arguments."""
        raise NotImplementedError

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's names, unless they already are: Lightning refuses to register a name twice."""
        for name, choices in {cls.strategy_name: {}, **cls.presets}.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=cls.__name__, **choices)
