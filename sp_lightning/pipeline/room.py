"""How much of the device a module may take, and how much of that a step leaves to gradients that wait there."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.visit import Visits
from sp_lightning.pipeline.window.arrangement import Arrangement

SHARE_OF_FREE_MEMORY = 0.9  # the budget, as a share of free device memory, if the user gives none


class Room:
    """The device memory for weights, gradients and activations.

    Attributes:
        least: The budget of the process that has least, if several have met.
    """

    arrangement: Arrangement
    stream: GradientStream

    def __init__(self, backend: Backend, visits: Visits, meter: Meter) -> None:
        self.least: int | None = None
        self._backend = backend
        self._visits = visits
        self._meter = meter

    @property
    def budget(self) -> int | None:
        """Device memory for weights, gradients on their way to the host and activations; None if no limit is known."""
        layout, given = self.arrangement.layout, self.arrangement.budget
        memory = None if given is not None else self._backend.memory()
        if memory is None:
            return given
        streaming = layout.streaming_bytes
        # what is free still includes what the first backward will allocate
        if torch.is_grad_enabled():
            streaming = min(streaming, layout.device_bytes + self.stream.routes.staging.nbytes())
        # what waits goes as units are updated
        streaming += self._visits.nbytes() + self.stream.bytes_on_device() + int(SHARE_OF_FREE_MEMORY * memory.free)
        return min(streaming, self.least or streaming)

    def left_for_gradients(self) -> float:
        """Return the bytes that neither are taken, nor will be if the step takes no more than it has so far."""
        given = self.arrangement.budget
        if given is not None:
            taken = self.arrangement.layout.streaming_bytes + self._visits.nbytes() + self._meter.step_peak
            return given - taken - self.stream.bytes_on_device()
        memory = self._backend.memory()
        if memory is None:
            return 0.0
        again = max(0, memory.peak_so_far - memory.allocated)
        return SHARE_OF_FREE_MEMORY * memory.free - again
