"""The Callback: prints the plan and what came of it. It only observes; the strategy is complete without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from sp_lightning._namespace import Namespace
from sp_lightning.pipeline import Stats, Summary, readable_bytes
from sp_lightning.strategy import SuperpipelineMixin

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class CallbackMixin(_Base):
    """What `SuperpipelineCallback` is in every namespace."""

    lightning: ClassVar[Namespace]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SuperpipelineMixin):
            self.lightning.warn(
                f"`{type(self).__name__}` does nothing: it describes `Trainer(strategy='superpipeline')`, but this"
                f" Trainer runs `{type(trainer.strategy).__name__}`."
            )

    # The strategy sets up after `setup` above and is torn down before `on_fit_end`: these hooks run in between.

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != self.lightning.fitting:
            self._plan(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outcome(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != self.lightning.fitting:
            self._outcome(trainer)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outcome(trainer)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outcome(trainer)

    def _plan(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, SuperpipelineMixin) and strategy.pipeline is not None:
            self.lightning.info(str(strategy.pipeline.summary()))

    def _outcome(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, SuperpipelineMixin) and strategy.pipeline is not None:
            self.lightning.info(outcome(strategy.pipeline.stats, strategy.pipeline.summary()))


def outcome(stats: Stats, summary: Summary) -> str:
    """Say in a few lines what was streamed, and what it saved.

    Args:
        stats: What the pipeline counted.
        summary: Its plan.
    """
    return (
        f"Superpipeline: {stats.steps} steps, {stats.loads} unit loads, {readable_bytes(stats.bytes_to_device)} to the"
        f" device, {readable_bytes(stats.bytes_to_host)} back; {stats.misses} loads came late,"
        f" {stats.heals} were repeated.\n"
        f"Weights on {summary.device}: at most {readable_bytes(summary.device_bytes)} of"
        f" {readable_bytes(summary.model_bytes)} ({summary.saved:.0%} saved).\n"
        f"On the host: weights {readable_bytes(summary.host_bytes)}, gradients"
        f" {readable_bytes(summary.host_gradient_bytes)}, optimizer {readable_bytes(summary.optimizer_bytes)};"
        f" {summary.host_bytes_per_parameter:.1f} bytes per parameter."
    )
