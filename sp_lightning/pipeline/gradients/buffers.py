"""How gradients lie in memory, and the memory through which they come to the host.

The gradients of a unit are put together in a *staging buffer* on the device, and leave it with one copy. Those that do
not stay where they land go through a *landing buffer* on the host, on their way into a sum or into the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, GradientLayout, gradient_bytes

_UNITS_PER_BUFFER = 5  # landing buffers limit how far the optimizer may fall behind


class GradientMemory:
    """Memory for the gradients of one unit; the tensors in it are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        # done when what was put into it last has been copied to the host; None if nothing was
        self.ticket: Ticket | None = None
        self._views: WeakKeyDictionary[GradientLayout, tuple[list[Tensor], Tensor]] = WeakKeyDictionary()

    def views(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
        """Return it as gradients, and as their norms."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.views(self.bytes)
        return found


class StagingBuffers:
    """Device memory in which units' gradients are put together: buffers that take turns, each large enough for any."""

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._buffers: list[GradientMemory] = []

    def reserve(self) -> None:
        """Allocate the buffers before a step: during it they would split memory that activations need in one piece."""
        if self._buffers:
            return
        nbytes = max((gradient_bytes(unit.weights) for unit in self._units), default=0)
        if nbytes:
            for _ in range(STAGING_BUFFERS):
                self._buffers.append(GradientMemory(self._backend.allocate(nbytes)))

    def take(self, nbytes: int) -> GradientMemory:
        """Return the next buffer, of at least `nbytes`; computing waits until the last copy out of it is done."""
        self.reserve()
        buffer = self._buffers.pop(0)
        if buffer.ticket is not None:
            self._backend.trace.wait(buffer.ticket, "gradients")
        if buffer.bytes.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            buffer = GradientMemory(self._backend.allocate(nbytes))
        self._buffers.append(buffer)
        return buffer

    def nbytes(self) -> int:
        """Return the bytes of device memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers.clear()


class LandingBuffer(GradientMemory):
    """Such memory on the host, through which gradients of one unit after the other pass."""

    def __init__(self, nbytes: int, backend: Backend, released: threading.Condition) -> None:
        self._host = HostBuffer(nbytes, backend, pin=True)
        super().__init__(self._host.bytes)
        self.is_free = False  # whether nothing is on its way into it, or waits in it to be read
        self._released = released

    def release(self) -> None:
        """Free it, as its gradients have been read."""
        with self._released:
            self.is_free = True
            self._released.notify_all()

    def close(self) -> None:
        """Unpin the memory, and let go of it; what lies in it keeps it."""
        self._host.release()


def landing_buffers(units: int) -> int:
    """Return how many landing buffers there may be, for so many units."""
    return max(2, -(-units // _UNITS_PER_BUFFER))


class LandingBuffers:
    """Host memory through which gradients pass: a few buffers that are used again."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._count = 0  # how many there may be
        self._buffers: list[LandingBuffer] = []
        self._released = threading.Condition()

    def serve(self, units: int) -> None:
        """Serve so many units of an arrangement."""
        self._count = landing_buffers(units)

    def take(self, nbytes: int) -> LandingBuffer:
        """Take a buffer; block until one is released if all are in use."""
        with self._released:
            self._released.wait_for(lambda: len(self._buffers) < self._count or self._free())
            is_full = len(self._buffers) >= self._count
            free = self._free()
            fitting = [buffer for buffer in free if buffer.bytes.nbytes >= nbytes]
            # not a much larger one, or all would become as large as the largest unit's
            if fitting and (is_full or fitting[0].bytes.nbytes <= 2 * nbytes):
                buffer = fitting[0]
            else:
                if is_full:
                    self._buffers.remove(free[0])
                    free[0].close()
                buffer = LandingBuffer(nbytes, self._backend, self._released)
                self._buffers.append(buffer)
            buffer.is_free = False
            return buffer

    def _free(self) -> list[LandingBuffer]:
        """Return the buffers that are free, the smallest first."""
        free = [buffer for buffer in self._buffers if buffer.is_free]
        return sorted(free, key=lambda buffer: buffer.bytes.nbytes)

    def abandon(self) -> None:
        """Release all buffers, after an exception."""
        for buffer in self._buffers:
            buffer.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory, when no copy is under way."""
        while self._buffers:
            self._buffers.pop().close()
