"""Host memory that is lent and taken back, for activations that leave the device for a while (offload.py).

Each step asks for the same sizes, so the first one allocates and page-locks the buffers, which costs more than copying,
and all others use them again. Where sizes differ from step to step (sentences of any length), a buffer also serves what
is smaller, and buffers that serve nothing any more make room for others.
"""

from __future__ import annotations

import bisect
import warnings
from operator import attrgetter

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.buffers import HostBuffer

_PAGE = 4096  # what a buffer takes at least
_size = attrgetter("nbytes")


class HostPool:
    """Lends host memory."""

    def __init__(self, backend: Backend) -> None:
        self.pinnable: int | None = None  # how many bytes may be page-locked; None for any number
        self.held = self.in_use = 0  # bytes that the pool has, and those that are on loan
        self._backend = backend
        self._pinned = self._most_in_use = 0
        self._buffers: set[HostBuffer] = set()
        self._free: list[HostBuffer] = []  # by their size
        self._has_warned = False

    def take(self, nbytes: int) -> HostBuffer:
        """Lend a buffer of at least so many bytes: the smallest there is."""
        size = -(-nbytes // _PAGE) * _PAGE
        place = bisect.bisect_left(self._free, size, key=_size)
        buffer = self._free.pop(place) if place < len(self._free) else self._make(size)
        self.in_use += buffer.nbytes
        self._most_in_use = max(self._most_in_use, self.in_use)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a buffer back. What is computed next must have waited for copies into and out of it."""
        if buffer in self._buffers:  # not if the pool was closed meanwhile
            self.in_use -= buffer.nbytes
            bisect.insort(self._free, buffer, key=_size)

    def close(self) -> None:
        """Undo page-locking; the memory itself lives as long as a tensor lies in it."""
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()
        self._free.clear()
        self.held = self.in_use = self._pinned = 0

    def _make(self, size: int) -> HostBuffer:
        # those that are free are too small: give them up if more would be held than ever was in use at once
        if self._free and self.held + size > max(self._most_in_use, self.in_use + size):
            self._backend.drain()  # the device may still be reading what was given back
            for small in self._free:
                self._pinned -= small.nbytes * small.pinned
                self.held -= small.nbytes
                small.release()
            self._buffers.difference_update(self._free)
            self._free.clear()
        free = available_host_memory()
        if free is not None and size > free:
            raise RuntimeError(
                f"Host memory is too small for offloaded activations: {readable_bytes(self.held)} are taken already, "
                f"{readable_bytes(size)} more are needed and {readable_bytes(free)} are free. Use a smaller batch, "
                "`activations='recompute'`, or a machine with more memory."
            )
        pin = self._backend.can_pin and (self.pinnable is None or self._pinned + size <= self.pinnable)
        buffer = HostBuffer(size, self._backend, pin)
        self._buffers.add(buffer)
        self.held += size
        self._pinned += size * buffer.pinned
        if self._backend.can_pin and self.pinnable != 0 and not buffer.pinned and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Host memory for offloaded activations could not be page-locked beyond {readable_bytes(self._pinned)} "
                "(the share of the host's memory that may be page-locked, or a limit of the system, see `ulimit -l`). "
                "Copies of the rest are slow.",
                stacklevel=2,
            )
        return buffer
