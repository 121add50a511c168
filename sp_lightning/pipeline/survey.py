"""What a planner may know of a pipeline, and what the engine knows of a planner (the `planning` package has one)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.lasting import Lasting
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.window_plan import WindowPlan
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.trace import Recording
from sp_lightning.pipeline.weights.units import Unit

SHARE_OF_FREE_MEMORY = 0.9  # that may be taken, where no budget says how much
_LESS = 0.85  # of it may be taken after each time that it did not suffice


class Survey:
    """A pipeline, as far as it matters for choosing a window.

    Args:
        lasting: The parts of the pipeline.
        arrangement: Gives the arrangement that is at work.
        gradients_there: Gives the bytes of device memory that there are by now for gradients on their way.

    Attributes:
        options: The user's choices.
        stats: Counters.
    """

    def __init__(
        self, lasting: Lasting, arrangement: Callable[[], Arrangement], gradients_there: Callable[[], int]
    ) -> None:
        self.options: PipelineOptions = lasting.options
        self.stats: Stats = lasting.stats
        self._lasting = lasting
        self._arrangement = arrangement
        self._gradients_there = gradients_there
        self._most_memory = 0

    @property
    def arrangement(self) -> Arrangement:
        """Units, and where their weights lie at the moment."""
        return self._arrangement()

    @property
    def activations(self) -> AutoPolicy | None:
        """What chooses for the activations of each unit; None where nothing does."""
        return self._lasting.activations.auto

    @property
    def budget(self) -> int | None:
        """Device memory for weights, gradients on their way and activations; None if no limit is known.

        Each time that it did not suffice for what was chosen, it is taken to be less: memory comes in pieces.
        """
        budget = self.arrangement.budget
        if budget is None:
            free = self._lasting.backend.free_memory()
            if free is None:
                return None
            streaming = self.arrangement.streaming_bytes()
            if torch.is_grad_enabled():  # what the first backward will make is still counted as free
                streaming = min(streaming, self.arrangement.device_bytes() + self._gradients_there())
            budget = streaming + int(SHARE_OF_FREE_MEMORY * free)
        return int(_LESS**self._lasting.learned.fresh_starts * budget)

    @property
    def activation_peak(self) -> int:
        """The most bytes of activations that were on the device in the step before."""
        return self._lasting.meter.step_peak

    @property
    def backward_passes(self) -> int:
        """How many have ended."""
        return self._lasting.activations.backward_passes

    def bytes_on_device(self, unit: Unit) -> int:
        """What a unit would take if it lived on the device; 0 if it may not, or if nothing of it is stepped.

        It may where the user wants that, if all optimizers step weight by weight: others look at weights together.
        """
        optimizers = self._lasting.optimizers
        trainable = [weight.master for weight in unit.every_weight if weight.master.requires_grad]
        if not (self.options.resident_optimizer and optimizers.step_by_unit and trainable):
            return 0
        weights = sum(w.master.nbytes + w.lowered * w.compute_bytes for w in unit.every_weight)
        return weights + sum(p.nbytes + on_device.state_bytes(optimizers.seen, p) for p in trainable)

    def begin_watching_memory(self) -> int | None:
        """Bytes of device memory that are allocated, where the device tells."""
        self._most_memory = 0
        self._lasting.activations.when_backward_ends = self._look_at_memory  # who counts anew between steps is late
        return self._lasting.backend.memory_in_use()

    def end_watching_memory(self) -> int:
        """The most bytes of device memory that were allocated since `begin_watching_memory`; 0 if it does not tell."""
        self._look_at_memory()
        self._lasting.activations.when_backward_ends = lambda: None
        return self._most_memory

    def _look_at_memory(self) -> None:
        self._most_memory = max(self._most_memory, self._lasting.backend.most_memory_in_use() or 0)

    def record(self) -> AbstractContextManager[Recording]:
        """Write down what the lanes are busy with in this scope."""
        return self._lasting.backend.trace.record()


class Planner(Protocol):
    """Is asked between steps, when no graph waits for its backward."""

    def before_step(self, survey: Survey, builds_graph: bool) -> WindowPlan | None:
        """What the next step is to run with; None for the smallest window.

        Args:
            survey: The pipeline.
            builds_graph: Whether the step may have a backward.
        """

    def start_over(self) -> None:
        """What was planned did not fit: it is forgotten."""

    def abandon(self) -> None:
        """A step was not finished, or the pipeline ends: whatever was being measured is worth nothing."""
