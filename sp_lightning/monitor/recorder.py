"""Records steps of a run now and then: enough to say where time goes, seldom enough to cost nothing.

A recording takes one step more than it is asked for. Copies and optimizer steps that an earlier step has asked for run
under the first one, unrecorded, and would be missing in the picture; so the first step is left out.
"""

from __future__ import annotations

from contextlib import ExitStack

from sp_lightning.pipeline import Pipeline, Recording

_SETTLING_STEPS = 5  # in the first ones the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next: at the end of each the host waits for the device


class Recorder:
    """Says when to record, and gives what was recorded.

    Args:
        pipeline: What is recorded.
        steps: How many steps a recording shows.
        interval: Steps from one recording to the next, at least 20; one has ended when the last of them begins.
        expected: How many steps the run has, as far as that is known; the first recording ends before.

    Attributes:
        latest: What was recorded last; None before.
        recomputed: How many units computed their forward twice in a step then.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int, expected: float) -> None:
        self.latest: Recording | None = None
        self.recomputed = 0.0
        self._pipeline = pipeline
        self._steps = steps + 1
        self._interval = max(interval, _LEAST_INTERVAL, self._steps + 1)
        self._first = max(0, min(_SETTLING_STEPS, int(min(expected, _LEAST_INTERVAL)) - self._steps))
        self._seen = 0
        self._left = 0
        self._scope = ExitStack()
        self._recording: Recording | None = None
        self._recomputed_before = 0

    def step_begins(self) -> Recording | None:
        """The next step is about to begin; gives what was recorded if the one before it was the last to record.

        Not when that one ends: what comes between, such as waiting for data, is part of a step.
        """
        self._left -= 1
        finished = self.finish() if self._left == 0 else None
        due = self._seen == self._first or self._seen % self._interval == self._interval - self._steps - 1
        if due and self._recording is None:
            self._recording = self._scope.enter_context(self._pipeline.record())
            self._left = self._steps
            self._recomputed_before = self._pipeline.stats.recomputed
        self._seen += 1
        return finished

    def finish(self) -> Recording | None:
        """End the recording, if there is one, whatever it has got: something else than training steps comes now."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        self._scope.close()
        if not recording.steps or (len(recording.steps) == 1 and self.latest is not None):
            return None
        self.recomputed = (self._pipeline.stats.recomputed - self._recomputed_before) / len(recording.steps)
        if len(recording.steps) > 1:
            recording.steps = recording.steps[1:]
        self.latest = recording
        return recording
