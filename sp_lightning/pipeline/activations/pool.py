"""Host memory that is lent and taken back, for activations that leave the device for a while (offload.py).

Each step asks for the same sizes, so the first one allocates and page-locks the memory, and all others reuse it. It
lies in a few large slabs, because page-locking costs more than copying. Where sizes differ from step to step (sentences
of any length), free neighbors are merged, and slabs that have become useless make room for others: there is never much
more than was in use at once.
"""

from __future__ import annotations

import bisect
import warnings
from typing import NamedTuple

from torch import Tensor

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.buffers import ALIGNMENT, HostBuffer

_LEAST_SLAB = 32 << 20
_GROWTH = 8  # a slab is at least an eighth of what the pool holds already: few slabs, little waste


class Loan(NamedTuple):
    """Host memory on loan; `bytes` has exactly the size that was asked for."""

    bytes: Tensor
    slab: _Slab
    start: int
    end: int


class HostPool:
    """Lends host memory.

    Attributes:
        pinnable: How many bytes may be page-locked; None for any number.
        held: Bytes of host memory that the pool holds.
        in_use: Bytes of host memory that are on loan.
    """

    def __init__(self, backend: Backend) -> None:
        self.pinnable: int | None = None
        self.held = 0
        self.in_use = 0
        self._backend = backend
        self._pinned = 0
        self._most_in_use = 0
        self._slabs: list[_Slab] = []
        self._has_warned = False

    def take(self, nbytes: int) -> Loan:
        """Lend memory.

        Raises:
            RuntimeError: If the host has too little memory left.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for slab in self._slabs:
            start = slab.take(size)
            if start is not None:
                break
        else:
            slab, start = self._add_slab(size), 0
            slab.take(size)
        self.in_use += size
        self._most_in_use = max(self._most_in_use, self.in_use)
        return Loan(slab.buffer.bytes[start : start + nbytes], slab, start, start + size)

    def give_back(self, loan: Loan) -> None:
        """Take memory back. What is computed next must have waited for copies into and out of it."""
        loan.slab.give_back(loan.start, loan.end)
        self.in_use -= loan.end - loan.start

    def close(self) -> None:
        """Undo page-locking; the memory itself lives as long as a tensor lies in it."""
        for slab in self._slabs:
            slab.buffer.release()
        self._slabs.clear()
        self.held = self.in_use = self._pinned = 0

    def _add_slab(self, least: int) -> _Slab:
        size = max(least, _LEAST_SLAB, self.held // _GROWTH // ALIGNMENT * ALIGNMENT)
        self._drop_idle_slabs(size)
        free = available_host_memory()
        if free is not None and size > free:
            raise RuntimeError(
                f"Host memory is too small for offloaded activations: {readable_bytes(self.held)} are taken already, "
                f"{readable_bytes(size)} more are needed and {readable_bytes(free)} are free. Use a smaller batch, "
                "`activations='recompute'`, or a machine with more memory."
            )
        pin = self._backend.can_pin and (self.pinnable is None or self._pinned + size <= self.pinnable)
        slab = _Slab(HostBuffer(size, self._backend, pin))
        self._slabs.append(slab)
        self.held += size
        self._pinned += size * slab.buffer.pinned
        if self._backend.can_pin and self.pinnable != 0 and not slab.buffer.pinned and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Host memory for offloaded activations could not be page-locked beyond {readable_bytes(self._pinned)} "
                "(the share of the host's memory that may be page-locked, or a limit of the system, see `ulimit -l`). "
                "Copies of the rest are slow.",
                stacklevel=2,
            )
        return slab

    def _drop_idle_slabs(self, coming: int) -> None:
        """Give up slabs of which nothing is on loan, if more is held than was ever needed: sizes have changed."""
        idle = [slab for slab in self._slabs if slab.is_idle]
        if not idle or self.held + coming <= max(self._most_in_use, self.in_use + coming):
            return
        self._backend.drain()  # the device may still be reading what was given back
        for slab in idle:
            self._pinned -= slab.size * slab.buffer.pinned
            self.held -= slab.size
            slab.buffer.release()
            self._slabs.remove(slab)


class _Slab:
    """One buffer and its gaps, of which nothing is on loan: in order, and no two of them adjacent."""

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer
        self.size = buffer.nbytes
        self._gaps = [(0, self.size)]

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is on loan."""
        return self._gaps == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Reserve so many bytes; return where it begins, or None if there is no room."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                if end - start == size:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (start + size, end)
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        """Turn them into a gap again, and merge it with adjacent gaps."""
        index = bisect.bisect(self._gaps, (start, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            index -= 1
            start = self._gaps.pop(index)[0]
        self._gaps.insert(index, (start, end))
