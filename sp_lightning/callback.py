"""The Callback: records steps while a model trains, logs metrics, draws a timeline, and gives advice at the end.

It only observes: the strategy is complete without it, and checkpoints contain nothing of it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from sp_lightning.monitor.advice import Evidence, diagnose
from sp_lightning.monitor.metrics import Counters, device_memory, timed_metrics
from sp_lightning.monitor.recorder import Recorder
from sp_lightning.pipeline import Pipeline, Recording
from sp_lightning.strategy import SuperpipelineMixin
from sp_lightning.timeline import break_down, check_timeline_path, write_timeline
from sp_lightning.trainer._namespace import Namespace, logged_step, logs_now

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class CallbackMixin(_Base):
    """Logs streaming metrics, draws a timeline and reports where the time went. It only observes.

    While a model trains, the Trainer's loggers receive metrics under `superpipeline/`. Every now and then a step is
    recorded to measure times; at the end of each recording the host waits once for the device.

    Args:
        timeline: The file to write a picture of where the time of a step goes to. Its suffix selects the format:
            ".html" (a page to zoom into), ".png", or ".json" (a Chrome trace). The file is written as soon as the first
            recording is complete, and again with later steps at the end of the run.
        timeline_steps: The number of steps in the timeline.
        summary: Whether to print the plan as a table when a run begins and, at the end, what was streamed and what
            would make it faster. Without this callback, the table is printed if the Trainer prints a model summary.

    Raises:
        ImportError: If `timeline` ends in ".png" and Pillow is not installed.
        ValueError: If `timeline` has another suffix, or `timeline_steps` is less than one.

    Example::

        trainer = Trainer(strategy="superpipeline", callbacks=SuperpipelineCallback(timeline="timeline.html"))
    """

    lightning: ClassVar[Namespace]

    def __init__(self, timeline: str | Path | None = None, timeline_steps: int = 1, summary: bool = True) -> None:
        super().__init__()
        if timeline_steps < 1:
            raise ValueError(f"`timeline_steps={timeline_steps}` must be at least 1.")
        self.timeline = None if timeline is None else check_timeline_path(timeline, "timeline")
        self.timeline_steps = timeline_steps
        self.summary = summary
        self._recorder: Recorder | None = None
        self._counters: Counters | None = None
        self._logged: int | None = None
        self._timed: dict[str, float] = {}
        self._written: Recording | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SuperpipelineMixin):
            self.lightning.warn(
                f"`{type(self).__name__}` does nothing: it describes `Trainer(strategy='superpipeline')`, but this "
                f"Trainer runs `{type(strategy).__name__}`."
            )

    # The strategy sets up after `setup` above and is torn down before `on_fit_end`: these hooks run in between.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = trainer.num_training_batches
        if trainer.max_steps > 0:
            batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
        self._begin(trainer, batches)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == self.lightning.fitting:
            self._finish_recording(trainer)
        else:
            self._begin(trainer, sum(trainer.num_val_batches))

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, sum(trainer.num_test_batches))

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, sum(trainer.num_predict_batches))

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._step_begins(trainer)

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.state.fn != self.lightning.fitting:
            self._step_begins(trainer)

    @override
    def on_test_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._step_begins(trainer)

    @override
    def on_predict_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._step_begins(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._log(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_recording(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != self.lightning.fitting:
            self._end(trainer)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # it must not hide the exception that ended the run
            if self._recorder is not None:
                self._recorder.finish()
        self._recorder = self._counters = None

    # ------------------------------------------------------------------------------------------------- what they do

    def _begin(self, trainer: Trainer, batches: float) -> None:
        pipeline = _pipeline(trainer)
        if pipeline is not None:
            interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self._counters = Counters(pipeline)
            self._recorder = Recorder(pipeline, self.timeline_steps, interval, batches)
            self._logged, self._timed, self._written = None, {}, None

    def _step_begins(self, trainer: Trainer) -> None:
        if self._recorder is not None:
            self._handle(trainer, self._recorder.step_begins())

    def _finish_recording(self, trainer: Trainer) -> None:
        if self._recorder is not None:
            self._handle(trainer, self._recorder.finish())

    def _handle(self, trainer: Trainer, recording: Recording | None) -> None:
        """Compute metrics from a recording, and write the timeline if it is the first one."""
        if recording is not None:
            self._timed = timed_metrics(break_down(recording))
            if self._written is None:  # at once, as the run may end at any time
                self._write(trainer, recording)

    def _write(self, trainer: Trainer, recording: Recording) -> None:
        pipeline = _pipeline(trainer)
        if self.timeline is None or pipeline is None or not trainer.is_global_zero:
            return
        summary = pipeline.summary()
        name = type(trainer.lightning_module).__name__
        assert trainer.state.fn is not None
        caption = f"{name}, {trainer.state.fn.value}, k={summary.k}, k_prime={summary.k_prime}, {summary.device}"
        self._written = recording
        try:
            write_timeline(recording, self.timeline, caption=caption)
        except OSError as error:  # must not end the training
            self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: {error}.")

    def _log(self, trainer: Trainer) -> None:
        """Log to the loggers directly: what the user's module logs, and what callbacks monitor, is not touched."""
        if self._counters is None or not trainer.loggers or not logs_now(trainer):
            return
        step = logged_step(trainer)
        if step != self._logged:  # accumulated batches belong to one step
            self._logged = step
            values, self._timed = {**self._counters.read(), **self._timed}, {}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def _end(self, trainer: Trainer) -> None:
        recorder, pipeline = self._recorder, _pipeline(trainer)
        self._recorder = self._counters = None
        if recorder is None or pipeline is None:
            return
        self._handle(trainer, recorder.finish())
        recording = recorder.latest
        if recording is not None and recording is not self._written:
            self._write(trainer, recording)
        if self.timeline is not None and recording is None:
            self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: no step was recorded.")
        if self.summary and recording is not None:
            evidence = self._evidence(trainer, pipeline, recording, recorder)
            self.lightning.info("\n".join(diagnose(evidence)))

    def _evidence(self, trainer: Trainer, pipeline: Pipeline, recording: Recording, recorder: Recorder) -> Evidence:
        peak, total = device_memory(pipeline)
        strategy = trainer.strategy
        assert isinstance(strategy, SuperpipelineMixin)
        return Evidence(
            numbers=break_down(recording),
            recomputed=recorder.recomputed,
            retries=recorder.retries,
            summary=pipeline.summary(),
            options=pipeline.options,
            device_peak=peak,
            device_total=total,
            waits_for_optimizer=strategy.why_optimizer_waits(),
        )


def _pipeline(trainer: Trainer) -> Pipeline | None:
    return trainer.strategy.pipeline if isinstance(trainer.strategy, SuperpipelineMixin) else None
