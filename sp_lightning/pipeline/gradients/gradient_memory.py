"""Memory for gradients: staging buffers on the device, memory next to the masters, and landing buffers on the host.

A unit's gradients are packed in a *staging buffer*, and leave it with one copy: to memory next to their masters, where
they stay, or to a *landing buffer*, which is pinned, and through which they pass into a sum or into the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, GradientLayout, gradient_bytes

_UNITS_PER_BUFFER = 5  # the number of buffers limits how far the optimizer may fall behind
# Where gradients wait, the optimizer reads one buffer, one has landed, and one is on its way.
FEW_BUFFERS = 3


class GradientMemory:
    """Memory for the gradients of one unit. The tensors in it are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        # The last copy out of it to the host; None if there was none.
        self.ticket: Ticket | None = None
        self._views: WeakKeyDictionary[GradientLayout, tuple[list[Tensor], Tensor]] = WeakKeyDictionary()

    def views(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
        """Return the memory as gradients, and as their norms."""
        views = self._views.get(layout)
        if views is None:
            views = layout.views(self.bytes)
            self._views[layout] = views
        return views


class StagingBuffers:
    """Buffers on the device in which units' gradients are packed; they take turns, and any unit's gradients fit."""

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._buffers: list[GradientMemory] = []
        self.buffer_count = STAGING_BUFFERS

    def reserve(self) -> None:
        """Allocate the buffers before a step: during it they would split memory that activations need in one piece."""
        if self._buffers:
            return
        nbytes = max((gradient_bytes(unit.weights) for unit in self._units), default=0)
        if nbytes:
            self._buffers = [GradientMemory(self._backend.allocate(nbytes)) for _ in range(self.buffer_count)]

    def release(self) -> None:
        """Drop buffers that have grown; computing waits for the copies out of them."""
        for buffer in self._buffers:
            if buffer.ticket is not None:
                self._backend.trace.wait(buffer.ticket, "gradients")
        self._buffers.clear()

    def take(self, nbytes: int) -> GradientMemory:
        """Return the next buffer, of at least `nbytes`; computing waits until the last copy out of it is done."""
        self.reserve()
        buffer = self._buffers[0]
        last_copy = buffer.ticket
        # If this wait fails, so does the step, and the next step finds nothing under way.
        buffer.ticket = None
        if last_copy is not None:
            self._backend.trace.wait(last_copy, "gradients")
        if buffer.bytes.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            buffer = GradientMemory(self._backend.allocate(nbytes))
        self._buffers = [*self._buffers[1:], buffer]
        return buffer

    def nbytes(self) -> int:
        """Return the bytes of device memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def drop_buffers(self) -> None:
        """Let go of the buffers."""
        self._buffers.clear()
        self.buffer_count = STAGING_BUFFERS


class MemoryBesideMasters:
    """The host memory that gradients of a segment stay in, made when first needed.

    The device writes gradients there as they came. If these are in other dtypes than their masters, memory for sums
    replaces it, and from then on the first gradients of a step go there, too, through a landing buffer.

    Attributes:
        memory: The memory, with or without gradients in it; None if there is none.
        has_sums: Whether it is for sums in other dtypes than those in which gradients come.
    """

    def __init__(self, masters: HostBuffer) -> None:
        self.memory: GradientMemory | None = None
        self.has_sums = False
        self._masters = masters

    def get(self, layout: GradientLayout, pin: bool, has_sums: bool = False) -> GradientMemory:
        """Return the memory; if there is none, make it for this layout."""
        if self.memory is None:
            buffer = self._masters.get_companion("gradients", layout.nbytes, pin=False)
            if pin:
                buffer.pin()
            self.memory = GradientMemory(buffer.bytes)
            self.has_sums = has_sums
        return self.memory

    def release(self) -> None:
        """Release the memory; gradients in it keep it alive."""
        self._masters.release_companion("gradients")
        self.forget()

    def forget(self) -> None:
        """Forget the memory, without releasing it."""
        self.memory = None
        self.has_sums = False

    def contains(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in the memory; a tensor without elements counts as being there."""
        if self.memory is None:
            return False
        start = self.memory.bytes.data_ptr()
        return not tensor.numel() or start <= tensor.data_ptr() < start + self.memory.bytes.nbytes


class LandingBuffer(GradientMemory):
    """Memory on the host, through which gradients of one unit after the other pass.

    Attributes:
        users: The number of users, each of which has reserved it, or has gradients in it or on their way into it.
        reservation: The number of its last reservation among those of all buffers.
        last_reader: The last job that reads it; None if there was none.
    """

    def __init__(self, host: HostBuffer, released: threading.Condition) -> None:
        super().__init__(host.bytes)
        self.host = host
        self.users = 0
        self.reservation = 0
        self.last_reader: Ticket | None = None
        self._awaits_reader = False  # whether it was reserved for a job that is not known yet
        self._released = released

    def reserve(self, reservation: int) -> None:
        """Reserve it for a job, which comes after the last reader."""
        assert not self._awaits_reader, "one job would overwrite its own gradients"
        self._awaits_reader = True
        if self.last_reader is not None and self.last_reader.done:
            self.last_reader = None  # it may have failed, which concerns no later job
        self.reservation = reservation
        self.users += 1

    def set_reader(self, job: Ticket) -> None:
        """Set the job that reads it."""
        self._awaits_reader = False
        self.last_reader = job

    def release_after_exception(self) -> None:
        """Free the buffer, whichever job has reserved it."""
        self._awaits_reader = False
        self.users = 0

    def release(self) -> None:
        """Free the buffer for its next user: its gradients have been read."""
        with self._released:
            self.users = max(0, self.users - 1)
            self._released.notify_all()


class MayWait(Protocol):
    """Knows whether gradients may wait on the device (routes.py)."""

    landing_bytes: int

    @property
    def may_happen(self) -> bool:
        """Whether any gradients may wait."""


def landing_buffers(units: int) -> int:
    """Return the number of landing buffers for a number of units."""
    return max(2, -(-units // _UNITS_PER_BUFFER))


def three_buffers(sizes: Iterable[int]) -> list[int]:
    """Return the sizes of three buffers, for units whose gradients have these sizes."""
    largest = sorted(sizes, reverse=True)[:FEW_BUFFERS]
    return [*largest[:1], *(FEW_BUFFERS - 1) * largest[-1:]]


class LandingBuffers:
    """The landing buffers, made when the first one is needed.

    There are few, of the sizes of the largest units. Where gradients may wait on the device because the host lacks
    room, there are three. Only one of these is as large as the two largest units, which are often an embedding and a
    head.
    """

    def __init__(self, backend: Backend, waiting: MayWait) -> None:
        self.backend = backend
        self._waiting = waiting
        self._buffers: list[LandingBuffer] = []  # all buffers, the smallest first
        self._released = threading.Condition()
        self._turns = count(1)
        # The bytes of each unit's gradients in the dtypes in which they arrive.
        self._arriving_bytes: list[int] = []
        # The bytes of each unit's gradients in the masters' dtypes, in which they are summed.
        self._sum_bytes: list[int] = []

    def size_for(self, units: Sequence[Unit]) -> None:
        """Size the buffers for these units; they are made when the first one is needed."""
        self._arriving_bytes = [gradient_bytes(unit.weights) for unit in units]
        self._sum_bytes = [gradient_bytes(unit.weights, are_sums=True) for unit in units]
        self._waiting.landing_bytes = sum(three_buffers(self._sum_bytes))

    def make_room(self, nbytes: int) -> None:
        """Size the buffers for one more unit, before the first buffer is taken."""
        self._arriving_bytes.append(nbytes)

    def take(self, nbytes: int) -> LandingBuffer:
        """Take the smallest buffer that is large enough; block until it is free."""
        with self._released:
            self._ensure_size(nbytes)
            large = self._large_enough(nbytes)
            free = self._released.wait_for(lambda: [buffer for buffer in large if not buffer.users])
            free[0].users += 1
            return free[0]

    def reserve(self, nbytes: int) -> LandingBuffer:
        """Return a large enough buffer, which is free once its last reader is done. The caller must hold no other.

        This blocks only if buffers have to grow.
        """
        with self._released:
            self._ensure_size(nbytes)
            buffer = min(self._large_enough(nbytes), key=attrgetter("users", "reservation"))
            buffer.reserve(next(self._turns))
            return buffer

    def _ensure_size(self, nbytes: int) -> None:
        """Make buffers if there are none; where gradients wait, make larger ones if none is large enough."""
        if not self._buffers:
            self._make(self._arriving_bytes)
        if nbytes > self._buffers[-1].bytes.nbytes and self._waiting.may_happen:
            self._released.wait_for(lambda: not any(buffer.users for buffer in self._buffers))
            for buffer in self._buffers:
                if buffer.last_reader is not None:
                    buffer.last_reader.join()
            self.free_memory()
            self._make([*self._sum_bytes, nbytes])

    def _large_enough(self, nbytes: int) -> list[LandingBuffer]:
        large = [buffer for buffer in self._buffers if buffer.bytes.nbytes >= nbytes]
        # Buffers were made when some weights were frozen, or lowered. This one is used once.
        if not large:
            large.append(LandingBuffer(HostBuffer(nbytes, self.backend, pin=False), self._released))
        return large

    def _make(self, unit_sizes: Sequence[int]) -> None:
        sizes = sorted(unit_sizes)[-landing_buffers(len(unit_sizes)) :]
        if self._waiting.may_happen:
            sizes = sorted(three_buffers(unit_sizes))
        host_buffers = [HostBuffer(size, self.backend, pin=True) for size in sizes]
        self._buffers = [LandingBuffer(buffer, self._released) for buffer in host_buffers]

    def release_all(self) -> None:
        """Release all buffers, after an exception."""
        with self._released:
            for buffer in self._buffers:
                buffer.release_after_exception()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def free_memory(self) -> None:
        """Free the memory, when no copy is under way; tensors in it keep it alive."""
        while self._buffers:
            self._buffers.pop().host.release()
