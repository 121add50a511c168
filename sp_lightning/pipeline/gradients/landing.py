"""Landing buffers: pinned host memory through which gradients pass on their way into a sum or into the optimizer.

There are few, of the sizes of the largest units. Where gradients may wait on the device because the host lacks room,
there are three. Only one of these is as large as the two largest units, which are often an embedding and a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import attrgetter

from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_memory import LandingBuffer
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.gradients.waiting import WaitingGradients
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, Backend
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer, as_bytes
from sp_lightning.pipeline.weights.segment import GradientLayout, gradient_bytes

_UNITS_PER_BUFFER = 5  # the number of buffers limits how far the optimizer may fall behind
# Where gradients wait, the optimizer reads one buffer, one has landed, and one is on its way.
FEW_BUFFERS = 3


def landing_buffers(units: int) -> int:
    """Return the number of landing buffers for a number of units."""
    return max(2, -(-units // _UNITS_PER_BUFFER))


def three_buffers(sizes: Iterable[int]) -> list[int]:
    """Return the sizes of three buffers, for units whose gradients have these sizes."""
    largest = sorted(sizes, reverse=True)[:FEW_BUFFERS]
    return [*largest[:1], *(FEW_BUFFERS - 1) * largest[-1:]]


class LandingBuffers:
    """The landing buffers, made when the first one is needed."""

    def __init__(self, backend: Backend, waiting: WaitingGradients) -> None:
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
            buffer = min(self._large_enough(nbytes), key=attrgetter("users", "turn"))
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


class LateGradients(DeferredTicket):
    """The gradients that have waited on the device for a unit's step, on their way to the host; done when they landed.

    Neither the host nor computing waits for the copies. The gradients themselves do not change: other code may read
    them meanwhile.

    Attributes:
        landed: The tensor on the host for each gradient.
        buffer: The buffer that they land in.
        sources: The tensors on the device; they are kept until the copies have landed.
        nbytes: The bytes of all gradients.
    """

    def __init__(
        self,
        name: str,
        gradients: Mapping[Gradient, Tensor],
        landing: LandingBuffers,
    ) -> None:
        self.sources = list(gradients.values())
        weights = [gradient.weight for gradient in gradients]
        layout = GradientLayout(weights, [source.dtype for source in self.sources])
        self.buffer = landing.reserve(layout.nbytes)
        self.landed = dict(zip(gradients, layout.views(self.buffer.bytes)[0], strict=True))
        self.nbytes = sum(source.nbytes for source in self.sources)
        self._name = name
        self._backend = landing.backend
        self._copy = Job(self._send, [self._backend.computed()], self.nbytes)
        after = [] if self.buffer.last_reader is None else [self.buffer.last_reader]
        super().__init__(Job(self._issue_copy, after, rank=BEFORE_OTHER_WORK))
        self._backend.issue_when_ready(self.job)

    def _issue_copy(self) -> None:
        """Issue the copy."""
        self.ticket = self._backend.trace.submit_to_lane(Kind.LATE_GRADIENTS, self._name, self._copy)

    def _send(self) -> None:
        """Copy gradients to the host; runs in their lane."""
        for target, source in zip(self.landed.values(), self.sources, strict=True):
            if self._backend.poison:
                self._backend.invalidate(as_bytes(target))
            self._backend.copy(target, source)
