"""Host memory that activations borrow while they are off the device."""

from __future__ import annotations

import bisect
from operator import attrgetter

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats, readable_bytes
from sp_lightning.pipeline.weights.buffers import HostBuffer

_PAGE = 4096  # bytes that a buffer takes at least
_size_of = attrgetter("nbytes")


class HostPool:
    """Lends host memory to activations that leave the device for a while.

    Each step asks for the same sizes. So the first one allocates and pins the buffers, which costs more than copying,
    and all others use them again. If sizes differ from step to step (sentences of any length), a buffer also serves
    smaller requests, and buffers that are too small make room for a larger one.
    """

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.nbytes = 0  # bytes that the pool has
        self._backend = backend
        self._stats = stats
        self._buffers: set[HostBuffer] = set()
        self._free: list[HostBuffer] = []  # by their size

    def take(self, nbytes: int) -> HostBuffer:
        """Lend a buffer of at least this many bytes: the smallest one that is free."""
        size = -(-nbytes // _PAGE) * _PAGE
        smallest = bisect.bisect_left(self._free, size, key=_size_of)
        if smallest < len(self._free):
            return self._free.pop(smallest)
        if self._free:  # all of them are too small, and make room
            self._stats.host_syncs += 1
            self._backend.drain()  # the device may still be reading buffers that were returned
            self._release(self._free)
        free = available_host_memory()
        if free is not None and size > free:
            raise RuntimeError(
                f"CPU memory is too small for offloaded activations: {readable_bytes(self.nbytes)} "
                f"are in use, {readable_bytes(size)} more are needed and "
                f"{readable_bytes(free)} are free. Use a smaller batch, `activations='recompute'`, "
                "or a machine with more memory."
            )
        buffer = HostBuffer(size, self._backend, pin=True)
        self._buffers.add(buffer)
        self.nbytes += size
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a buffer back. The next computation must have waited for copies into and out of it."""
        if buffer in self._buffers:  # not if the pool was closed meanwhile
            bisect.insort(self._free, buffer, key=_size_of)

    def close(self) -> None:
        """Unpin the memory; it exists for as long as a tensor is in it."""
        self._release(list(self._buffers))

    def _release(self, buffers: list[HostBuffer]) -> None:
        self._buffers.difference_update(buffers)
        self._free = []
        for buffer in buffers:
            self.nbytes -= buffer.nbytes
            buffer.release()
