"""The first steps, watched: how many are recorded, and what a recording does not show."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress

from sp_lightning.pipeline import Recording, Survey
from sp_lightning.pipeline.activations.ways import Policy

_WARM_UP = 1  # steps before the recording
_RECORDED = 2
_PATIENCE = 32  # steps to wait for one of the optimizer


class FirstSteps:
    """Watches steps until enough of them are recorded.

    Args:
        survey: The pipeline.
        trains: Whether the steps have a backward.
        waits: Whether to wait for a step of the optimizer, before the recording and in it.

    Attributes:
        trains: Whether the steps have a backward.
        recording: What the lanes did.
        policies: For each step, the policy of each member's activations, if they are chosen per unit.
        activation_peak: Peak bytes of activations.
        reserve_bytes: Device memory that must stay free beside weights, gradients and activations.
        optimizer_steps: Steps of optimizers since the recording has begun.
        steps_in_backward: Units that were stepped before backward had ended since then.
    """

    def __init__(self, survey: Survey, trains: bool, waits: bool) -> None:
        self.trains = trains
        self.recording = Recording()
        self.policies: list[Mapping[str, Policy]] = []
        self.activation_peak = self.reserve_bytes = self.optimizer_steps = self.steps_in_backward = 0
        self._survey = survey
        self._waits = waits
        self._steps = -1  # the first call comes before the first step
        self._whole_steps = 0
        self._scope: ExitStack | None = None
        self._note_counts()

    def _note_counts(self) -> None:
        survey = self._survey
        self._before = (survey.optimizer_steps, survey.stats.steps_in_backward)
        self._passes = survey.backward_passes

    def go_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        self.optimizer_steps = self._survey.optimizer_steps - self._before[0]
        self.steps_in_backward = self._survey.stats.steps_in_backward - self._before[1]
        is_late = self._steps >= _PATIENCE
        saw_optimizer = self.optimizer_steps > 0 or not self._waits or is_late
        if self._scope is None:
            if saw_optimizer and self._steps >= _WARM_UP:
                self._waits &= not is_late
                self._start()
            return True
        self._note_step()
        if saw_optimizer and (self._whole_steps >= _RECORDED or is_late):
            self.stop()
            return False
        return True

    def _start(self) -> None:
        self._steps = 0
        self._note_counts()
        self._in_use = self._survey.begin_watching_memory()
        self._scope = ExitStack()
        self.recording = self._scope.enter_context(self._survey.record())

    def _note_step(self) -> None:
        survey, auto = self._survey, self._survey.activations
        self.policies.append({} if auto is None else dict(auto.in_use))
        if auto is not None:  # depends on the policies in use, as memory that two units save is counted for both
            auto.update_peaks()
        self.activation_peak = max(self.activation_peak, survey.activation_peak)
        before, self._passes = self._passes, survey.backward_passes
        self._whole_steps += self._passes > before or not self._waits  # one that returns no loss has no backward

    def stop(self) -> None:
        """End the recording, if it has begun."""
        if self._scope is None:
            return
        auto, most_in_use = self._survey.activations, self._survey.end_watching_memory()
        with suppress(Exception):  # a failed copy has raised elsewhere
            self._scope.close()
        self.reserve_bytes = 0 if auto is None else auto.reserve_bytes
        if self._in_use is not None and (auto is None or not auto.counts_operations):
            self.reserve_bytes = max(0, most_in_use - self._in_use - self.activation_peak)
