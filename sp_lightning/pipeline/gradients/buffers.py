"""Memory through which gradients come to the host: staging buffers on the device, and landing buffers on the host.

The gradients of a unit are put together in a *staging buffer*, and leave it with one copy. Those that do not stay where
they land go through a *landing buffer*, on their way into a sum or into the optimizer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from torch import Tensor

from sp_lightning.pipeline.gradients.layout import GradientLayout, gradient_bytes
from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.units import Unit

STAGING_BUFFERS = 2  # one is filled while the other leaves
_LEFT_FREE = 0.1  # of the host's memory, when there are more landing buffers than a few
_UNITS_PER_BUFFER = 5  # where host memory is scarce, buffers limit how far the optimizer may fall behind


class TensorsIn:
    """Memory viewed as one tensor per gradient; the tensors are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._made: dict[GradientLayout, tuple[list[Tensor], Tensor]] = {}

    def views(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
        """Return its bytes as gradients, and as their norms."""
        found = self._made.get(layout)
        if found is None:
            found = self._made[layout] = layout.tensors_in(self.memory), layout.norms_in(self.memory)
        return found


class StagingBuffer(TensorsIn):
    """Device memory in which the gradients of one unit are put together.

    Attributes:
        ticket: The last copy out of it; None if there was none.
    """

    def __init__(self, nbytes: int, backend: Backend) -> None:
        super().__init__(backend.allocate(nbytes))
        self.ticket: Ticket | None = None


class StagingBuffers:
    """Staging buffers that take turns, each large enough for any unit's gradients."""

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._buffers: list[StagingBuffer] = []
        self._turn = 0

    def reserve(self) -> None:
        """Allocate the buffers before a step: during it they would split memory that activations need in one piece."""
        if not self._buffers and (nbytes := max(map(gradient_bytes, self._units), default=0)):
            self._backend.gather_free_memory()
            self._buffers = [StagingBuffer(nbytes, self._backend) for _ in range(STAGING_BUFFERS)]

    def take(self, nbytes: int) -> StagingBuffer:
        """Return the next buffer, of at least `nbytes`; computing waits until the last copy out of it is done."""
        if len(self._buffers) < STAGING_BUFFERS:
            self._turn = len(self._buffers)
            self._buffers.append(StagingBuffer(max(nbytes, *map(gradient_bytes, self._units)), self._backend))
            return self._buffers[-1]
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        buffer = self._buffers[self._turn]
        if buffer.ticket is not None:
            self._backend.trace.wait(buffer.ticket, "gradients")
        if buffer.memory.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            buffer = self._buffers[self._turn] = StagingBuffer(nbytes, self._backend)
        return buffer

    def abandon(self) -> None:
        """Forget the copies out of the buffers, after an exception; a collective operation may still use one."""
        self._buffers.clear()

    def nbytes(self) -> int:
        """Return the bytes of device memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory, when no copy is under way."""
        self._buffers.clear()


class LandingBuffer(TensorsIn):
    """Host memory through which the gradients of one unit pass.

    Attributes:
        host: The memory, as it was allocated.
        is_free: Whether nothing is on its way into it, or waits in it to be read.
    """

    def __init__(self, host: HostBuffer, released: threading.Condition) -> None:
        super().__init__(host.bytes)
        self.host = host
        self.is_free = True
        self._released = released

    def release(self) -> None:
        """Free the buffer, as its gradients have been read."""
        with self._released:
            self.is_free = True
            self._released.notify_all()


class LandingBuffers:
    """Buffers that are used again and again; a new one is made only if no other is free."""

    def __init__(self, units: Sequence[Unit], backend: Backend, pin: bool) -> None:
        self._units = units
        self._backend = backend
        self._pin = pin
        self._buffers: list[LandingBuffer] = []
        self._released = threading.Condition()

    def take(self, nbytes: int, patient: bool) -> LandingBuffer:
        """Take a buffer; block until one is released if all are in use and there may not be more.

        Args:
            nbytes: The least bytes that it must have.
            patient: Whether to rather wait than have more than a few, where the host has memory to spare.
        """
        with self._released:
            while (buffer := self._find(nbytes, patient)) is None:
                self._released.wait()
            buffer.is_free = False
            return buffer

    def _find(self, nbytes: int, patient: bool) -> LandingBuffer | None:
        """Find a free buffer that is large enough, or make one; None if there may not be more."""
        free = sorted((each for each in self._buffers if each.is_free), key=lambda each: each.memory.nbytes)
        is_full = len(self._buffers) >= self._few() and (patient or not _is_left_over(nbytes))
        most = sys.maxsize if is_full else 2 * nbytes  # or all would become as large as the largest unit's
        fitting = [buffer for buffer in free if nbytes <= buffer.memory.nbytes <= most]
        if fitting:
            return fitting[0]
        if is_full and not free:
            return None
        if is_full:
            self._buffers.remove(free[0])
            free[0].host.release()
        self._buffers.append(LandingBuffer(HostBuffer(nbytes, self._backend, self._pin), self._released))
        return self._buffers[-1]

    def _few(self) -> int:
        """Return how many buffers there may be on any host; there are more where it has memory to spare."""
        together: int = max(unit.group.unit_count for unit in self._units)
        return max(2, together + 1, -(-len(self._units) // _UNITS_PER_BUFFER))

    def abandon(self) -> None:
        """Release all buffers, after an exception."""
        for buffer in self._buffers:
            buffer.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory, when no copy is under way."""
        while self._buffers:
            self._buffers.pop().host.release()


def _is_left_over(nbytes: int) -> bool:
    """Tell whether the host has so much memory to spare."""
    free, total = available_host_memory(), total_host_memory()
    return free is not None and total is not None and free - nbytes >= _LEFT_FREE * total
