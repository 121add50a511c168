"""Records steps of a run every now and then: often enough to tell where time goes, seldom enough not to cost any.

A recording spans one step more than it shows. Copies and optimizer steps that an earlier step has issued are not
recorded when they run during the first one, and would be missing from the picture; so the first step is dropped.
"""

from __future__ import annotations

from contextlib import ExitStack

from sp_lightning.pipeline import Pipeline, Recording

_SETTLING_STEPS = 5  # first steps, in which the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next, because each makes the host wait for the device at its end


class Recorder:
    """Decides when to record, and returns the recordings.

    Args:
        pipeline: The engine.
        steps: Number of steps that a recording shows.
        interval: Steps from one recording to the next, at least 20. A recording ends when the last of them begins.
        expected: Number of steps of the run, as far as it is known; the first recording ends before that.

    Attributes:
        latest: The latest recording; None before the first.
        recomputed: Number of units that computed their forward twice in a step of the latest recording.
        retries: How often in such a step the allocator ran out of memory, freed its cache and tried again.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int, expected: float) -> None:
        self.latest: Recording | None = None
        self.recomputed = self.retries = 0.0
        self._pipeline = pipeline
        self._steps = steps + 1
        self._interval = max(interval, _LEAST_INTERVAL, self._steps + 1)
        self._first = max(0, min(_SETTLING_STEPS, int(min(expected, _LEAST_INTERVAL)) - self._steps))
        self._seen = 0
        self._left = 0
        self._scope = ExitStack()
        self._recording: Recording | None = None
        self._recomputed_before = self._retries_before = 0

    def step_begins(self) -> Recording | None:
        """Note that a step is about to begin, and return the recording if the previous step was the last one in it.

        A recording does not end with its last step: the time between steps, such as waiting for data, is part of it.
        """
        self._left -= 1
        finished = self.finish() if self._left == 0 else None
        due = self._seen == self._first or self._seen % self._interval == self._interval - self._steps - 1
        if due and self._recording is None:
            self._recording = self._scope.enter_context(self._pipeline.record())
            self._left = self._steps
            self._recomputed_before = self._pipeline.stats.recomputed
            self._retries_before = self._pipeline.survey.allocation_retries
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
        self.recomputed = (self._pipeline.stats.recomputed - self._recomputed_before) / len(recording.steps)
        self.retries = (self._pipeline.survey.allocation_retries - self._retries_before) / len(recording.steps)
        if len(recording.steps) > 1:
            recording.steps = recording.steps[1:]
        self.latest = recording
        return recording
