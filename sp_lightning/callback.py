"""The Callback: records steps while a model trains, logs metrics, and writes a timeline.

It only observes: the strategy is complete without it, and checkpoints contain nothing of it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from sp_lightning.pipeline import Pipeline, Recording
from sp_lightning.planning.report import readable_seconds
from sp_lightning.strategy import SuperpipelineMixin
from sp_lightning.timeline import Breakdown, break_down, check_timeline_path, write_timeline
from sp_lightning.trainer import Namespace, is_fitting, logged_step, logs_now

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

PREFIX = "superpipeline/"
_SETTLING_STEPS = 5  # first steps, in which the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next: at the end of each the host waits once


class CallbackMixin(_Base):
    """Logs streaming metrics, writes a timeline and reports where the time went. It only observes.

    While a model trains, the Trainer's loggers receive metrics under `superpipeline/`. Every now and then a step is
    recorded to measure times; at the end of each recording the host waits once for the device.

    Args:
        timeline: The file to write where the time of a step goes to. Its suffix selects the format: ".html" (a page to
            zoom into) or ".json" (a Chrome trace). The file is written whenever a recording is complete.
        timeline_steps: The number of steps in the timeline.

    Raises:
        ValueError: If `timeline` has another suffix, or `timeline_steps` is less than one; before a run, if the
            timeline cannot be written.

    Examples:
        >>> trainer = Trainer(strategy="superpipeline", callbacks=SuperpipelineCallback(timeline="timeline.html"))
    """

    lightning: ClassVar[Namespace]

    def __init__(self, timeline: str | Path | None = None, timeline_steps: int = 1) -> None:
        super().__init__()
        if timeline_steps < 1:
            raise ValueError(f"`timeline_steps={timeline_steps}` must be at least 1.")
        self.timeline = None if timeline is None else check_timeline_path(timeline, "timeline")
        self.timeline_steps = timeline_steps
        self._monitor: Monitor | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SuperpipelineMixin):
            self.lightning.warn(
                f"`{type(self).__name__}` does nothing: it describes "
                "`Trainer(strategy='superpipeline')`, but this Trainer runs "
                f"`{type(strategy).__name__}`."
            )
        elif self.timeline is not None and trainer.is_global_zero:
            try:  # before the run, not after its first steps
                self.timeline.parent.mkdir(parents=True, exist_ok=True)
                self.timeline.open("a").close()
            except OSError as error:
                words = f"`timeline={str(self.timeline)!r}` cannot be written: {error}."
                raise ValueError(words) from error

    # The strategy sets up after `setup` above and is torn down before `on_fit_end`: these hooks run in between.

    def _begin_step(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        strategy = trainer.strategy
        if _is_within_a_fit(trainer) or not isinstance(strategy, SuperpipelineMixin) or strategy.pipeline is None:
            return
        if self._monitor is None:
            interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self._monitor = Monitor(strategy.pipeline, self.timeline_steps, interval)
        if self._monitor.ends_recording():
            self._finish_recording(trainer)
        self._monitor.begin_step()

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_step

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        # To the loggers directly: what the user's module logs, and what callbacks monitor, is not touched.
        monitor = self._monitor
        if monitor is None or not trainer.loggers or not logs_now(trainer):
            return
        step = logged_step(trainer)
        if step == monitor.logged_step:  # accumulated batches belong to one step
            return
        monitor.logged_step = step
        values = {PREFIX + name: value for name, value in monitor.read().items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def _finish_recording(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End a recording, if there is one, and write it at once, as the run may end at any time."""
        monitor = self._monitor
        recording = None if monitor is None else monitor.finish()
        if monitor is None or recording is None or self.timeline is None or not trainer.is_global_zero:
            return
        assert trainer.state.fn is not None
        plan = monitor.pipeline.summary()
        run = f"{type(trainer.lightning_module).__name__}, {trainer.state.fn.value}"
        try:
            write_timeline(recording, self.timeline, caption=f"{run}, k={plan.k}, {plan.device}")
        except OSError as error:  # must not end the training
            self._warn_of_timeline(error)

    on_validation_start = on_train_epoch_end = _finish_recording

    def _end_run(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if _is_within_a_fit(trainer):
            return
        self._finish_recording(trainer)
        monitor = self._monitor
        self._monitor = None
        if monitor is None:
            return
        if monitor.numbers is not None:
            step = readable_seconds(monitor.numbers.seconds / monitor.numbers.steps)
            self.lightning.info(f"A step takes {step}. {monitor.numbers.headline()}")
        elif self.timeline is not None:
            self._warn_of_timeline("no step was recorded")

    on_train_end = on_validation_end = on_test_end = on_predict_end = _end_run

    @override
    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        with suppress(Exception):  # it must not hide the exception that ended the run
            if self._monitor is not None:
                self._monitor.finish()
        self._monitor = None

    def _warn_of_timeline(self, reason: object) -> None:
        self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: {reason}.")


def _is_within_a_fit(trainer: Trainer) -> bool:
    """Tell whether a fit validates, of which nothing is measured."""
    return is_fitting(trainer) and not trainer.training


class Monitor:
    """Counts what a run does, and records steps: often enough to tell where time goes, seldom enough not to cost any.

    A recording shows only its last steps. Copies and optimizer steps that were issued before it are not recorded when
    they run during its first step, and would be missing; and in the first steps of a run the engine learns.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int) -> None:
        self.pipeline = pipeline  # the engine
        self.numbers: Breakdown | None = None  # of the latest recording; None before the first
        self.logged_step: int | None = None  # the latest step that was logged
        self._times: dict[str, float] = {}  # what a recording has measured since then
        self._counted = self._count()
        self._shown = steps
        self._recorded = _SETTLING_STEPS + steps + 1  # steps from a recording's beginning to its end
        self._interval = max(interval, _LEAST_INTERVAL, self._recorded + 1)
        self._seen = 0  # steps
        self._scope = ExitStack()
        self._recording: Recording | None = None

    def ends_recording(self) -> bool:
        """Tell whether the step that has ended is the last one of a recording.

        A recording does not end with its last step: the time between steps, such as waiting for data, is part of it.
        """
        return self._seen % self._interval == self._recorded

    def begin_step(self) -> None:
        """Note that a step is about to begin, now and then with a recording."""
        if self._seen % self._interval == 0:
            self._recording = self._scope.enter_context(self.pipeline.record())
        self._seen += 1

    def finish(self) -> Recording | None:
        """End the current recording, if there is one, and return it if it shows anything new.

        Called early when the run ends, or something else comes between training steps.
        """
        recording = self._recording
        if recording is None:
            return None
        self._recording = None
        self._scope.close()
        if not recording.steps or (len(recording.steps) == 1 and self.numbers is not None):
            return None
        recording.steps = recording.steps[1:][-self._shown :] or recording.steps
        self.numbers = break_down(recording)
        recording.spans = [span for span in recording.spans if span.end > self.numbers.begin]
        self._times = self.numbers.metrics()
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
        """Return what is to be logged: memory, means over the steps since the last call, and newly measured times."""
        summary, memory = self.pipeline.summary(), self.pipeline.backend.memory()
        # where torch does not count a device's memory, the engine has counted its own
        peak = summary.device_bytes + summary.gradient_bytes
        peak += self.pipeline.stats.activation_peak_bytes
        on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
        counted = self._count()
        since = {name: count - self._counted[name] for name, count in counted.items()}
        steps = max(1, since.pop("steps"))
        values = {
            "device_peak_bytes": float(peak if memory is None else memory.peak_so_far),
            "host_bytes": float(on_host),
            **{name: count / steps for name, count in since.items()},
            **self._times,
        }
        self._counted = counted
        self._times = {}
        return values
