"""This package's strategy: with its own choices, with given k and k_prime, and set to use less device memory.

By default it uses all available device memory, if only to keep activations that would otherwise be recomputed; with a
budget, `memory_budget`. Systems that recompute all activations show how little it needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import lightning as L
from typing_extensions import override

import sp_lightning
from sp_lightning.pipeline import Pipeline, Recording
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.timeline import break_down
from suite.systems.base import System
from suite.workloads import Kind, Window, Workload


class Superpipeline(System):
    """`Trainer(strategy="superpipeline")`."""

    name = "superpipeline"
    title = "superpipeline"
    takes_windows = True
    takes_budgets = True
    activations: ClassVar[ActivationPolicy] = "auto"
    observed_steps: ClassVar[int] = 2  # one that is left out, as in the callback's own recordings, and one that counts

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        super().__init__(window, budget)
        self._observer = _Observer(self.observed_steps)

    @override
    def checkpoints_blocks(self, workload: Workload) -> bool:
        return False  # the strategy recomputes, unit by unit

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        k, k_prime = self.window or ("auto", 1)
        strategy = sp_lightning.SuperpipelineStrategy(
            k=k, k_prime=k_prime, activations=self.activations, memory_budget=self.budget
        )
        return {"strategy": strategy, "precision": workload.precision, "callbacks": [self._observer]}

    @override
    def waits(self) -> dict[str, float] | None:
        return self._observer.waits

    @override
    def facts(self) -> dict[str, Any]:
        return self._observer.facts


class SuperpipelineRecompute(Superpipeline):
    """`SuperpipelineStrategy(activations="recompute")`."""

    name = "superpipeline-recompute"
    title = "superpipeline_recompute"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"train"})
    takes_windows = False
    takes_budgets = False
    activations = "recompute"


class SuperpipelineLeast(SuperpipelineRecompute):
    """One unit on the device at a time: the least device memory possible."""

    name = "superpipeline-least"
    title = "superpipeline, recompute, k=1"

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        super().__init__(window or (1, 1), budget)


class _Observer(L.Callback):
    """Records the last steps, with the metrics that `SuperpipelineCallback` logs, and keeps the engine's choices.

    The callback itself would record in the middle of the measured steps.
    """

    def __init__(self, steps: int) -> None:
        self.waits: dict[str, float] | None = None
        self.facts: dict[str, Any] = {}
        self._steps = steps
        self._scope = ExitStack()
        self._recording: Recording | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        """Begin to record when only the observed steps are left."""
        self._begin(trainer, index, trainer.max_steps)

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        """Begin to record when only the observed steps are left."""
        self._begin(trainer, index, sum(trainer.num_predict_batches))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the recording."""
        self._end(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the recording."""
        self._end(trainer)

    def _begin(self, trainer: L.Trainer, index: int, steps: float) -> None:
        if index == steps - self._steps:
            self._recording = self._scope.enter_context(_pipeline(trainer).record())

    def _end(self, trainer: L.Trainer) -> None:
        self._scope.close()
        pipeline, recording = _pipeline(trainer), self._recording
        if recording is not None and len(recording.steps) > 1:
            recording.steps = recording.steps[1:]
            self.waits = break_down(recording).metrics()
        plan, memory = pipeline.summary(), pipeline.backend.memory()
        counted = plan.device_bytes + plan.gradient_bytes + pipeline.stats.activation_peak_bytes
        self.facts = {
            "units": plan.units,
            "k": plan.k,
            "k_prime": pipeline.options.k_prime,
            "pinned": plan.pinned,
            "host_bytes_per_parameter": (plan.host_bytes + plan.host_gradient_bytes + plan.optimizer_bytes)
            / plan.parameters,
            # Of the whole run; on a CPU, where torch counts nothing, this is the memory that a device would hold.
            "counted_device_peak_bytes": counted if memory is None else memory.peak_so_far,
            "misses": pipeline.stats.misses,
            "recomputed": pipeline.stats.recomputed,
            "resets": pipeline.stats.resets,
        }


def _pipeline(trainer: L.Trainer) -> Pipeline:
    strategy = trainer.strategy
    assert isinstance(strategy, sp_lightning.SuperpipelineStrategy)
    assert strategy.pipeline is not None
    return strategy.pipeline
