"""The Callback: records steps while a model trains, logs metrics, draws a timeline, and gives advice at the end.

It only observes: the strategy is complete without it, and checkpoints contain nothing of it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from sp_lightning.pipeline import Pipeline, Recording
from sp_lightning.strategy import SuperpipelineMixin
from sp_lightning.timeline import break_down, check_timeline_path, why_not_written, write_timeline
from sp_lightning.trainer import Namespace, is_fitting, logged_step, logs_now
from sp_lightning.trainer.host_memory import name_more_compact
from sp_lightning.trainer.narrator import device_memory, diagnose

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

PREFIX = "superpipeline/"
_SETTLING_STEPS = 5  # first steps, in which the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next, because each makes the host wait for the device at its end


class CallbackMixin(_Base):
    """Logs streaming metrics, draws a timeline and reports where the time went. It only observes.

    While a model trains, the Trainer's loggers receive metrics under `superpipeline/`. Every now and then a step is
    recorded to measure times; at the end of each recording the host waits once for the device.

    Args:
        timeline: The file to write a picture of where the time of a step goes to. Its suffix selects the format:
            ".html" (a page to zoom into), ".svg" (the same picture), or ".json" (a Chrome trace). The file is written
            whenever a recording is complete.
        timeline_steps: The number of steps in the timeline.
        summary: Whether to print the plan as a table when a run begins and, at the end, what was streamed and what
            would make it faster. Without this callback, the table is printed if the Trainer prints a model summary.

    Raises:
        ValueError: If `timeline` has another suffix, or `timeline_steps` is less than one; before a run, if the
            timeline cannot be written.

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
        self._monitor: Monitor | None = None
        self._logged: int | None = None
        self._timed: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SuperpipelineMixin):
            self.lightning.warn(
                f"`{type(self).__name__}` does nothing: it describes `Trainer(strategy='superpipeline')`, but this "
                f"Trainer runs `{type(strategy).__name__}`."
            )
        elif self.timeline is not None and trainer.is_global_zero and (reason := why_not_written(self.timeline)):
            raise ValueError(f"`timeline={str(self.timeline)!r}` cannot be written: {reason}.")

    # The strategy sets up after `setup` above and is torn down before `on_fit_end`: these hooks run in between.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, SuperpipelineMixin) and strategy.pipeline is not None:
            interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self._monitor = Monitor(strategy.pipeline, self.timeline_steps, interval)
            self._logged, self._timed = None, {}

    on_test_start = on_predict_start = on_train_start

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_fitting(trainer):
            self._finish_recording(trainer)
        else:
            CallbackMixin.on_train_start(self, trainer, pl_module)  # not what a subclass adds to training

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self._monitor is not None:
            self._evaluate(trainer, self._monitor, self._monitor.step_begins())

    on_test_batch_start = on_predict_batch_start = on_train_batch_start  # type: ignore[assignment]

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if not is_fitting(trainer):
            CallbackMixin.on_train_batch_start(self, trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        # To the loggers directly: what the user's module logs, and what callbacks monitor, is not touched.
        if self._monitor is None or not trainer.loggers or not logs_now(trainer):
            return
        step = logged_step(trainer)
        if step != self._logged:  # accumulated batches belong to one step
            self._logged = step
            values, self._timed = {**self._monitor.read(), **self._timed}, {}
            for logger in trainer.loggers:
                logger.log_metrics({PREFIX + name: value for name, value in values.items()}, step=step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_recording(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_recording(trainer)
        strategy, monitor, self._monitor = trainer.strategy, self._monitor, None
        if monitor is None or not isinstance(strategy, SuperpipelineMixin):
            return
        if monitor.latest is None and self.timeline is not None:
            self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: no step was recorded.")
        if monitor.latest is not None and self.summary:
            numbers, reason = break_down(monitor.latest), strategy.why_optimizer_waits()
            compact = name_more_compact(strategy.optimizers)
            self.lightning.info("\n".join(diagnose(numbers, monitor.pipeline, monitor.retries, reason, compact)))

    on_test_end = on_predict_end = on_train_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_fitting(trainer):
            CallbackMixin.on_train_end(self, trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # it must not hide the exception that ended the run
            if self._monitor is not None:
                self._monitor.finish()
        self._monitor = None

    def _finish_recording(self, trainer: Trainer) -> None:
        if self._monitor is not None:
            self._evaluate(trainer, self._monitor, self._monitor.finish())

    def _evaluate(self, trainer: Trainer, monitor: Monitor, recording: Recording | None) -> None:
        """Compute metrics from a recording, if there is a new one, and draw it."""
        if recording is None:
            return
        self._timed = break_down(recording).metrics()
        if self.timeline is not None and trainer.is_global_zero:  # at once, as the run may end at any time
            assert trainer.state.fn is not None
            plan, name = monitor.pipeline.summary(), type(trainer.lightning_module).__name__
            caption = f"{name}, {trainer.state.fn.value}, k={plan.k}, k_prime={plan.k_prime}, {plan.device}"
            try:
                write_timeline(recording, self.timeline, caption=caption)
            except OSError as error:  # must not end the training
                self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: {error}.")


class Monitor:
    """Counts what a run does, and records steps: often enough to tell where time goes, seldom enough not to cost any.

    A recording shows only its last steps. Copies and optimizer steps that were issued before it are not recorded when
    they run during its first step, and would be missing from the picture; and in the first steps of a run the engine
    learns.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int) -> None:
        self.pipeline = pipeline  # the engine
        self.latest: Recording | None = None  # the latest recording; None before the first
        self._first = self._counted = self._count()
        self._shown = steps
        self._interval = max(interval, _LEAST_INTERVAL, steps + 2)
        self._seen = 0
        self._last = _SETTLING_STEPS + steps + 1  # the step whose beginning ends the recording
        self._scope = ExitStack()
        self._recording: Recording | None = None

    def step_begins(self) -> Recording | None:
        """Note that a step is about to begin, and return the recording if the previous step was the last one in it.

        A recording does not end with its last step: the time between steps, such as waiting for data, is part of it.
        """
        finished = self.finish() if self._seen == self._last else None
        position = self._seen % self._interval
        if self._recording is None and (self._seen == 0 or position == self._interval - self._shown - 2):
            self._recording = self._scope.enter_context(self.pipeline.record())
            self._last = self._seen + self._shown + 1 + (_SETTLING_STEPS if self._seen == 0 else 0)
        self._seen += 1
        return finished

    def finish(self) -> Recording | None:
        """End the current recording early, if there is one, and return it if it shows anything new.

        Called when the run ends, or something else comes between training steps.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        self._scope.close()
        if not recording.steps or (len(recording.steps) == 1 and self.latest is not None):
            return None
        recording.steps = recording.steps[1:][-self._shown :] or recording.steps
        begin = recording.steps[0][0]
        recording.spans = [span for span in recording.spans if span.end > begin]
        self.latest = recording
        return recording

    def _count(self) -> dict[str, int]:
        stats, memory = self.pipeline.stats, self.pipeline.backend.memory()
        return {
            "steps": stats.steps,
            "to_device_bytes": stats.bytes_to_device,
            "to_host_bytes": stats.bytes_to_host,
            "loads": stats.loads,
            "late_loads": stats.misses,
            "heals": stats.heals,
            "allocation_retries": memory.retries if memory else 0,
        }

    def read(self) -> dict[str, float]:
        """Return what is logged whenever Lightning logs: means over the steps since the last call, and memory."""
        before, self._counted = self._counted, self._count()
        summary = self.pipeline.summary()
        on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
        return {
            "device_peak_bytes": float(device_memory(self.pipeline)[0]),
            "host_bytes": float(on_host + summary.host_activation_bytes),
            **_means(before, self._counted),
        }

    @property
    def retries(self) -> float:
        """How often in a step of this run the allocator ran out of memory, freed its cache and tried again."""
        return _means(self._first, self._count())["allocation_retries"]


def _means(before: dict[str, int], now: dict[str, int]) -> dict[str, float]:
    steps = max(1, now["steps"] - before["steps"])
    return {name: (count - before[name]) / steps for name, count in now.items() if name != "steps"}
