"""Landing buffers: pinned host memory through which gradients pass on their way into a sum or into the optimizer.

There are few, of the sizes of the largest units. Where gradients may wait on the device as the host lacks room, there
are three, of which one alone is as large as the two largest units: these are often an embedding and a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import attrgetter

from torch import Tensor

from sp_lightning.pipeline.gradients.segment_gradients import Gradient, LandingBuffer
from sp_lightning.pipeline.gradients.waiting import WaitingRoom
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, Backend
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer, as_bytes
from sp_lightning.pipeline.weights.segment import GradientLayout, gradient_bytes
from sp_lightning.pipeline.weights.weight import Weight

_UNITS_PER_BUFFER = 5  # they limit how far the optimizer may fall behind
FEW_BUFFERS = 3  # where gradients wait: one is read by the optimizer, one has landed, and one is on its way


def landing_buffers(units: int) -> int:
    """Return the number of landing buffers for a number of units."""
    return max(2, -(-units // _UNITS_PER_BUFFER))


def three_buffers(sizes: Iterable[int]) -> list[int]:
    """Return the sizes of three buffers, for units whose gradients have these sizes."""
    largest = sorted(sizes, reverse=True)[:FEW_BUFFERS]
    return [*largest[:1], *(FEW_BUFFERS - 1) * largest[-1:]]


class LandingBuffers:
    """The landing buffers, made when the first one is needed."""

    def __init__(self, backend: Backend, waiting: WaitingRoom) -> None:
        self._backend = backend
        self._waiting = waiting
        self._buffers: list[LandingBuffer] = []  # the smallest first
        self._released = threading.Condition()
        self._turns = count(1)
        self._came: list[int] = []  # bytes of each unit's gradients, as they come
        self._sums: list[int] = []  # in the masters' dtypes

    def size_for(self, units: Sequence[Unit]) -> None:
        """Have buffers for these units, from when one is needed."""
        self._came = [gradient_bytes(unit.weights) for unit in units]
        self._sums = [max(gradient_bytes(unit.weights), _bytes_of_sums(unit.weights)) for unit in units]

    def make_room(self, nbytes: int) -> None:
        """Have a buffer for so much, too, before the first is taken."""
        self._came.append(nbytes)

    def take(self, nbytes: int) -> LandingBuffer:
        """Take the smallest buffer that is large enough; block until it is free."""
        with self._released:
            large = self._large_enough(nbytes)
            self._released.wait_for(lambda: any(not buffer.users for buffer in large))
            buffer = next(buffer for buffer in large if not buffer.users)
            buffer.users += 1
            return buffer

    def reserve(self, nbytes: int) -> LandingBuffer:
        """Return a buffer that is large enough, and free once its last reader is done; without blocking."""
        with self._released:
            buffer = min(self._large_enough(nbytes), key=attrgetter("users", "turn"))
            buffer.users, buffer.turn = buffer.users + 1, next(self._turns)
            return buffer

    def _large_enough(self, nbytes: int) -> list[LandingBuffer]:
        if not self._buffers:
            self._make(self._came)
        if nbytes > self._buffers[-1].bytes.nbytes and self._waiting.is_limited:
            self._released.wait_for(lambda: not any(buffer.users for buffer in self._buffers))
            self.free_memory()
            self._make([*self._sums, nbytes])
        large = [buffer for buffer in self._buffers if buffer.bytes.nbytes >= nbytes]
        if not large:  # some weights were frozen, or lowered; it is used once
            large.append(LandingBuffer(HostBuffer(nbytes, self._backend, pin=False), self._released))
        return large

    def _make(self, sizes: Sequence[int]) -> None:
        made = [HostBuffer(size, self._backend, pin=True) for size in sorted(self._sizes(sizes))]
        self._buffers = [LandingBuffer(buffer, self._released) for buffer in made]

    def _sizes(self, of_units: Sequence[int]) -> list[int]:
        if self._waiting.is_limited:
            return three_buffers(of_units)
        return sorted(of_units)[-landing_buffers(len(of_units)) :]

    def land_late(self, name: str, gradients: Mapping[Gradient, Tensor]) -> LateGradients:
        """Have gradients of a unit that have waited on the device land; neither the host nor computing waits."""
        weights = [gradient.weight for gradient in gradients]
        layout = GradientLayout(weights, [tensor.dtype for tensor in gradients.values()])
        return LateGradients(name, gradients, layout, self.reserve(layout.nbytes), self._backend)

    def release_all(self) -> None:
        """Release all buffers, after an exception."""
        with self._released:
            for buffer in self._buffers:
                buffer.users = 0

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def most_nbytes(self) -> int:
        """Return the bytes of host memory that they may take for sums."""
        return sum(self._sizes(self._sums))

    def free_memory(self) -> None:
        """Free the memory, when no copy is under way; what lies in it keeps it."""
        while self._buffers:
            self._buffers.pop().host.release()


class LateGradients(DeferredTicket):
    """Gradients on their way from the device to an update on the host; done when they have landed.

    They stay what they are: others may read them meanwhile.

    Attributes:
        landed: Where each of them will be.
        buffer: The buffer that they land in.
        sources: Where they come from, to be held until they have landed.
        nbytes: How much they are.
    """

    def __init__(
        self,
        name: str,
        gradients: Mapping[Gradient, Tensor],
        layout: GradientLayout,
        buffer: LandingBuffer,
        backend: Backend,
    ) -> None:
        self.sources = list(gradients.values())
        self.landed = dict(zip(gradients, layout.views(buffer.bytes)[0], strict=True))
        self.buffer = buffer
        self.nbytes = sum(source.nbytes for source in self.sources)
        self._name = name
        self._backend = backend
        self._copy = Job(self._send, [backend.computed()], self.nbytes)
        after = [] if buffer.last_reader is None else [buffer.last_reader]
        super().__init__(Job(self._issue_copy, after, rank=BEFORE_OTHER_WORK))
        backend.issue_when_ready(self.job)

    def _issue_copy(self) -> None:
        """Ask for the copy."""
        self.ticket = self._backend.trace.submit_to_lane(Kind.LATE_GRADIENTS, self._name, self._copy)

    def _send(self) -> None:
        """Copy gradients to the host, in their lane."""
        for target, source in zip(self.landed.values(), self.sources, strict=True):
            if self._backend.poison:
                self._backend.invalidate(as_bytes(target))
            self._backend.copy(target, source)


def _bytes_of_sums(weights: Iterable[Weight]) -> int:
    trained = [weight for weight in weights if weight.master.requires_grad]
    return GradientLayout(trained, [weight.dtype for weight in trained]).nbytes
