"""What the engine remembers of a step that may have to run again, so that it can take back what the step has done.

Here are weights and gradients. What else a step may change belongs to the user's module and to the Trainer, and is
taken back by trainer/attempt.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sp_lightning.pipeline.gradients.new_gradients import NewGradients
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.journal import Journal


class StepRecord:
    """The record of one step after the other; empty while steps do not run again.

    Args:
        optimizers: Count optimizer steps.
        stats: Counters.

    Attributes:
        weights: What weights were before the step wrote to them.
        gradients: Which gradients the step has made.
    """

    def __init__(self, optimizers: Optimizers, stats: Stats) -> None:
        self.weights = Journal()
        self.gradients = NewGradients()
        self._optimizers = optimizers
        self._stats = stats
        self._steps_before = self._steps_taken()

    def begin(self) -> None:
        """Begin a step that may have to run again."""
        self.weights.begin()
        self.gradients.begin()
        self._steps_before = self._steps_taken()

    def end(self) -> None:
        """Forget everything: the step will not run again."""
        self.weights.end()
        self.gradients.end()

    def note_elsewhere(self, parameters: Callable[[], dict[str, nn.Parameter]]) -> None:
        """Note parameters that are not streamed, once units are arranged for the step.

        Args:
            parameters: Returns them by name.
        """
        self.gradients.note_before(lambda: parameters().values())
        self.weights.note_elsewhere(parameters)

    def has_stepped(self) -> bool:
        """Tell whether an optimizer has changed weights since the step began."""
        return self._steps_before != self._steps_taken()

    def _steps_taken(self) -> tuple[int, int]:
        return self._optimizers.steps_taken, self._stats.steps_in_backward
