"""Records steps of a run every now and then: often enough to tell where time goes, seldom enough not to cost any.

A recording shows only its last steps. Copies and optimizer steps that were issued before it are not recorded when they
run during its first step, and would be missing from the picture; and in the first steps of a run the engine learns.
"""

from __future__ import annotations

from contextlib import ExitStack

from sp_lightning.pipeline import Pipeline, Recording

_SETTLING_STEPS = 5  # first steps, in which the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next, because each makes the host wait for the device at its end


class Recorder:
    """Decides when to record, and returns the recordings.

    Attributes:
        latest: The latest recording; None before the first.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int) -> None:
        self.latest: Recording | None = None
        self._pipeline = pipeline
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
            self._recording = self._scope.enter_context(self._pipeline.record())
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
