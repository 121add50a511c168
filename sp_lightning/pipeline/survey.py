"""The interfaces between pipeline and planner: a planner's view of a pipeline, and the engine's view of a planner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.lanes.trace import Recording
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.window_plan import WindowPlan
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.units import Unit

SHARE_OF_FREE_MEMORY = 0.9  # the budget, as a share of free device memory, if the user gives none


class Survey:
    """A planner's view of a pipeline: what matters for choosing a window.

    Attributes:
        options: The user's options.
        stats: Counters.
    """

    def __init__(self, engine: Engine) -> None:
        self.options: PipelineOptions = engine.options
        self.stats: Stats = engine.stats
        self._engine = engine

    @property
    def arrangement(self) -> Arrangement:
        """The units, and where their weights currently lie."""
        return self._engine.arrangement

    @property
    def activations(self) -> AutoPolicy | None:
        """The policy that chooses for each unit's activations; None where none does."""
        return self._engine.activations.auto

    @property
    def budget(self) -> int | None:
        """Device memory for weights, gradients on their way and activations; None if no limit is known."""
        budget = self.arrangement.budget
        if budget is None:
            free = self._engine.backend.free_memory()
            if free is None:
                return None
            streaming = self.arrangement.streaming_bytes()
            if torch.is_grad_enabled():  # `free` still includes what the first backward will allocate
                streaming = min(streaming, self.arrangement.device_bytes() + self._engine.stream.device_bytes())
            budget = streaming + int(SHARE_OF_FREE_MEMORY * free)
        return budget

    @property
    def activation_peak(self) -> int:
        """The peak bytes of activations on the device in the previous step."""
        return self._engine.meter.step_peak

    @property
    def peak_memory(self) -> int | None:
        """The peak bytes of device memory so far, whoever has allocated them; None if the device does not report it."""
        return self._engine.backend.peak_memory()

    @property
    def usable_memory(self) -> int | None:
        """The bytes of device memory that this process has or can have; None if the device does not report it."""
        return self._engine.backend.usable_memory()

    @property
    def allocation_retries(self) -> int:
        """How often the device's allocator ran out of memory, freed its cache and tried again."""
        return self._engine.backend.allocation_retries()

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps."""
        return self._engine.optimizers.steps_taken

    @property
    def backward_passes(self) -> int:
        """Number of backward passes that have ended."""
        return self._engine.activations.backward_passes

    def bytes_on_device(self, unit: Unit) -> int:
        """Return what a unit would take if it lived on the device; 0 if it may not, or if nothing of it is trained.

        It may if the user allows it and every optimizer steps weight by weight; others look at weights together.
        """
        optimizers = self._engine.optimizers
        trainable = [weight.master for weight in unit.every_weight if weight.master.requires_grad]
        if not (self.options.resident_optimizer and optimizers.step_by_unit and trainable):
            return 0
        weights = sum(w.nbytes + w.lowered * w.compute_bytes for w in unit.every_weight)
        return weights + sum(p.nbytes + on_device.state_bytes(optimizers.seen, p) for p in trainable)

    def begin_watching_memory(self) -> int | None:
        """Start to track peak device memory. Return the bytes allocated now; None if the device does not report it."""
        # sampled at the end of each backward, because somebody may reset the device's peak between steps
        self._engine.activations.watched_peak = 0
        return self._engine.backend.reset_peak_memory()

    def end_watching_memory(self) -> int:
        """Return the peak bytes of device memory since `begin_watching_memory`; 0 if the device does not report it."""
        activations = self._engine.activations
        watched, activations.watched_peak = activations.watched_peak or 0, None
        return max(watched, self._engine.backend.peak_since_reset() or 0)

    def record(self) -> AbstractContextManager[Recording]:
        """Record what the lanes do in this scope."""
        return self._engine.backend.trace.record()


class Planner(Protocol):
    """Chooses the window; asked between steps, when no graph waits for its backward."""

    def before_step(self, survey: Survey, builds_graph: bool) -> WindowPlan | None:
        """Return the plan for the next step; None for the smallest window.

        Args:
            survey: The pipeline.
            builds_graph: Whether the step may have a backward.
        """

    def abandon(self) -> None:
        """Discard the measurement under way: a step did not finish, or the pipeline ends."""
