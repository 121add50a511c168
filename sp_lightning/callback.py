"""The Callback: records steps while a model trains, logs metrics, and writes a timeline.

It only observes: the strategy is complete without it, and checkpoints contain nothing of it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from sp_lightning.pipeline import Lane, Pipeline, Recording, WindowPlan
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
_AS_PLANNED = 0.15  # a part of a step's time by which it may differ from the plan
_LIMITS = {Lane.COMPUTE: "computing", Lane.HOST: "work on the CPU"}
_LEAST_INTERVAL = 20  # steps from one recording to the next: at the end of each the host waits once


class CallbackMixin(_Base):
    """Logs streaming metrics, writes a timeline and reports the use of time. It only observes.

    While a model trains, the Trainer's loggers receive metrics under `superpipeline/`. Now and then a step is recorded
    to measure times; at the end of each recording the CPU waits for the GPU once.

    Args:
        timeline: The file to write the timeline of a step to. Its suffix selects the format: ".html" (a page to zoom
            into) or ".json" (a Chrome trace). The file is written whenever a recording is complete, for the first time
            after a few steps; a warning says if that fails.
        timeline_steps: The number of steps in the timeline.

    Raises:
        ValueError: If `timeline` has another suffix, or `timeline_steps` is less than one.

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
        # the steps of a run, some of which are recorded
        self._steps: Generator[None, bool, None] | None = None
        self._numbers: Breakdown | None = None  # of the latest recording
        # the times that a recording has measured since the last log
        self._times: dict[str, float] = {}
        self._logged_step: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SuperpipelineMixin):
            self.lightning.warn(
                f"`{type(self).__name__}` does nothing here. It describes "
                f"`Trainer(strategy='superpipeline')`, but this Trainer runs `{type(strategy).__name__}`."
            )
        else:
            strategy.narrator.is_asked = True

    # The strategy sets up after `setup` above and is torn down before `on_fit_end`: these hooks run in between.

    def _begin_step(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SuperpipelineMixin) or strategy.pipeline is None:
            return
        if is_fitting(trainer) and not trainer.training:  # a fit that validates is not measured
            return
        if self._steps is None:
            self._numbers = self._logged_step = None
            self._counted = _count(strategy.pipeline)
            self._steps = self._record(trainer, strategy.pipeline)
        next(self._steps)

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_step

    def _record(self, trainer: Trainer, pipeline: Pipeline) -> Generator[None, bool, None]:
        """Record a few steps now and then. Each step begins with `next`; sending True ends a recording early.

        That is often enough to show the use of time, and seldom enough to cost none. A recording does not end with its
        last step: the time between steps, such as waiting for data, is part of it.
        """
        length = _SETTLING_STEPS + self.timeline_steps + 1
        wished: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        interval = max(wished, _LEAST_INTERVAL, length + 1)
        while True:
            with pipeline.record() as recording:
                for _ in range(length):
                    if (yield):
                        break
            self._evaluate(trainer, pipeline, recording)
            for _ in range(interval - length):
                yield

    def _evaluate(self, trainer: Trainer, pipeline: Pipeline, recording: Recording) -> None:
        """Take the measurements from a recording, and write it at once, as the run may end at any time.

        Only its last steps are shown. Copies and optimizer steps that were issued before the recording, and run during
        its first step, are not recorded and would be missing. And in the first steps of a run the engine learns.
        """
        if not recording.steps or (len(recording.steps) == 1 and self._numbers is not None):
            return
        recording.steps = recording.steps[1:][-self.timeline_steps :] or recording.steps
        numbers = break_down(recording)
        recording.spans = [span for span in recording.spans if span.end > numbers.begin]
        self._numbers = numbers
        self._times = numbers.metrics()
        if self.timeline is None or not trainer.is_global_zero:
            return
        assert trainer.state.fn is not None
        plan = pipeline.summary()
        run = f"{type(trainer.lightning_module).__name__}, {trainer.state.fn.value}"
        try:
            write_timeline(recording, self.timeline, caption=f"{run}, k={plan.k}, {plan.device}")
        except OSError as error:  # the error must not end the training
            self._warn_of_timeline(error)

    def _warn_of_timeline(self, reason: object) -> None:
        self.lightning.warn(f"`timeline={str(self.timeline)!r}` was not written: {reason}.")

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        # This logs to the loggers directly, and leaves the user's logged values and monitored metrics alone.
        if self._steps is None or not trainer.loggers or not logs_now(trainer):
            return
        step = logged_step(trainer)
        if step == self._logged_step:  # accumulated batches belong to one step
            return
        self._logged_step = step
        strategy: Any = trainer.strategy
        pipeline: Pipeline = strategy.pipeline
        summary, memory = pipeline.summary(), pipeline.backend.memory()
        # where torch does not count a device's memory, the engine has counted its own
        peak = summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes
        on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
        # means over the steps since the last log
        counted = _count(pipeline)
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
        for logger in trainer.loggers:
            logger.log_metrics({PREFIX + name: value for name, value in values.items()}, step=step)

    def _finish_recording(self, *args: Any, **kwargs: Any) -> None:
        if self._steps is not None:
            self._steps.send(True)

    on_validation_start = on_train_epoch_end = _finish_recording

    def _end_run(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._steps is None or (is_fitting(trainer) and not trainer.training):
            return
        self._finish_recording()
        self._steps = None
        if self._numbers is not None:
            step = readable_seconds(self._numbers.seconds / self._numbers.steps)
            strategy: Any = trainer.strategy
            plan = strategy.pipeline.summary().plan if trainer.training else None
            missed = "" if plan is None else unlike_the_plan(self._numbers, plan, trainer.accumulate_grad_batches)
            self.lightning.info(f"A step takes {step}. {self._numbers.headline()}{missed}")
        elif self.timeline is not None:
            self._warn_of_timeline("no step was recorded")

    on_train_end = on_validation_end = on_test_end = on_predict_end = _end_run

    @override
    def on_exception(self, *args: Any) -> None:
        with suppress(Exception):  # it must not hide the exception that ended the run
            if self._steps is not None:
                self._steps.close()
        self._steps = None


def unlike_the_plan(numbers: Breakdown, plan: WindowPlan, batches: int) -> str:
    """Say how long a plan expected a batch to take, and what it missed, if that is off by a lot; else nothing."""
    expected, measured = plan.step_seconds / batches, numbers.seconds / numbers.steps
    if not expected or abs(measured - expected) <= _AS_PLANNED * expected:
        return ""
    words = f" The plan expected {readable_seconds(expected)}"
    if measured < expected:
        return f"{words}."
    causes = {
        "time in which no unit computes": numbers.elsewhere,
        **{f"waits for {cause}": stalled for cause, stalled in numbers.stalls.items()},
        "computing": numbers.busy[Lane.COMPUTE] - expected * numbers.steps,
    }
    largest = max(causes, key=causes.__getitem__)
    return f"{words}, limited by {_LIMITS.get(plan.bottleneck, 'copies')}; most of the difference is {largest}."


def _count(pipeline: Pipeline) -> dict[str, int]:
    stats, memory = pipeline.stats, pipeline.backend.memory()
    return {
        "steps": stats.steps,
        "to_device_bytes": stats.bytes_to_device,
        "to_host_bytes": stats.bytes_to_host,
        "loads": stats.loads,
        "late_loads": stats.misses,
        "heals": stats.heals,
        "allocation_retries": memory.retries if memory else 0,
    }
