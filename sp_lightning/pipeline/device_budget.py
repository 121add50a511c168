"""The part of the device that a module may take, and the part of that which a step leaves to gradients that wait."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.visit import Visits
from sp_lightning.pipeline.window.arrangement import Arrangement

SHARE_OF_FREE_MEMORY = 0.9  # the budget, as a share of free device memory, if the user gives none


class DeviceBudget:
    """The device memory for weights, gradients and activations.

    Attributes:
        least: The smallest budget of several processes, after they have met.
    """

    arrangement: Arrangement
    stream: GradientStream

    def __init__(self, backend: Backend, visits: Visits, meter: Meter) -> None:
        self.least: int | None = None
        self._backend = backend
        self._visits = visits
        self._meter = meter

    @property
    def nbytes(self) -> int | None:
        """Device memory for weights, gradients on their way to the host and activations; None if no limit is known."""
        layout, user_budget = self.arrangement.layout, self.arrangement.budget
        memory = None if user_budget is not None else self._backend.memory()
        if memory is None:
            return user_budget
        streaming = layout.streaming_bytes
        # The bytes that the first backward will allocate are still free.
        if torch.is_grad_enabled():
            streaming = min(streaming, layout.device_bytes + self.stream.routes.staging.nbytes())
        # Gradients that wait release their memory as units are updated.
        streaming += self._visits.nbytes() + self.stream.bytes_on_device() + int(SHARE_OF_FREE_MEMORY * memory.free)
        return min(streaming, self.least or streaming)

    def left_for_gradients(self) -> float:
        """Return the bytes that are free, and stay free if the step takes no more than it has so far."""
        user_budget = self.arrangement.budget
        if user_budget is not None:
            taken = self.arrangement.layout.streaming_bytes + self._visits.nbytes() + self._meter.step_peak
            return user_budget - taken - self.stream.bytes_on_device()
        memory = self._backend.memory()
        if memory is None:
            return 0.0
        next_peak = max(0, memory.peak_so_far - memory.allocated)
        return SHARE_OF_FREE_MEMORY * memory.free - next_peak
