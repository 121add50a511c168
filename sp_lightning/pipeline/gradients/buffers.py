"""Memory through which gradients come to the host: staging buffers on the device, and landing buffers on the host.

The gradients of a unit are put together in a *staging buffer*, and leave it with one copy. Those that do not stay as
they came (homes.py) land in a *landing buffer*, on their way into a sum or into the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

STAGING_BUFFERS = 2  # one is filled while the other leaves
_LEFT_FREE = 0.1  # of the host's memory, when there are more landing buffers than a few
_UNITS_PER_BUFFER = 5  # where host memory is scarce, buffers limit how far the optimizer may fall behind


def gradient_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's gradients, as they are sent to the host, with their norms."""
    weights = tuple(weight for weight in unit.weights if weight.master.requires_grad)
    return GradientLayout(weights, tuple(weight.gradient_dtype for weight in weights)).nbytes


def unit_of(weights: Sequence[Weight]) -> Unit | None:
    """Return the unit that has all of these weights, in this order; None if there is none."""
    unit, given = weights[0].unit, set(weights)
    return unit if [weight for weight in unit.weights if weight in given] == list(weights) else None


class TensorsIn:
    """Memory viewed as one tensor per gradient; the tensors are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._made: dict[GradientLayout, tuple[list[Tensor], Tensor]] = {}

    def tensors(self, layout: GradientLayout) -> list[Tensor]:
        """Return its bytes as gradients."""
        return self._tensors_and_norms(layout)[0]

    def norms(self, layout: GradientLayout) -> Tensor:
        """Return its bytes as the norms of these gradients."""
        return self._tensors_and_norms(layout)[1]

    def _tensors_and_norms(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
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


@dataclass(eq=False)
class Parcel:
    """The gradients of a unit, put together in a staging buffer, before their route is chosen.

    Attributes:
        unit: The unit.
        layout: How they lie in the staging buffer.
        staging: The memory that they lie in.
        has_norms: Whether their norms lie behind them.
    """

    unit: Unit
    layout: GradientLayout
    staging: StagingBuffer
    has_norms: bool = False

    def measure(self) -> None:
        """Compute the norms of the gradients, which then travel with them."""
        gradients, norms = self.staging.tensors(self.layout), self.staging.norms(self.layout)
        torch.stack(torch._foreach_norm(gradients, 2, torch.float32), out=norms)
        self.has_norms = True

    @property
    def bytes_to_send(self) -> int:
        """Bytes to copy: the norms are among them only if they were computed."""
        return self.layout.nbytes if self.has_norms else self.layout.norms_at


class StagingBuffers:
    """Staging buffers that take turns, each large enough for any unit's gradients.

    Args:
        units: The units.
        backend: Allocates the memory.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._buffers: list[StagingBuffer] = []
        self._turn = 0

    def reserve(self) -> None:
        """Allocate the buffers before a step: during it they would split memory that activations need in one piece."""
        if not self._buffers and (nbytes := max(map(gradient_bytes, self._units), default=0)):
            self._backend.gather_free_memory()
            self._buffers = [self.make(nbytes) for _ in range(STAGING_BUFFERS)]

    def take(self, nbytes: int) -> StagingBuffer:
        """Return the next buffer, of at least `nbytes`; computing waits until the last copy out of it is done."""
        if len(self._buffers) < STAGING_BUFFERS:
            self._turn = len(self._buffers)
            self._buffers.append(self.make(max(nbytes, *map(gradient_bytes, self._units))))
            return self._buffers[-1]
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        ticket = self._buffers[self._turn].ticket
        if ticket is not None:
            self._backend.trace.wait(ticket, "gradients")
        if self._buffers[self._turn].memory.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            self._buffers[self._turn] = self.make(nbytes)
        return self._buffers[self._turn]

    def make(self, nbytes: int) -> StagingBuffer:
        """Make a buffer of `nbytes` that does not take turns."""
        return StagingBuffer(nbytes, self._backend)

    def discard(self, buffer: StagingBuffer) -> None:
        """Never use this buffer again."""
        self._buffers = [other for other in self._buffers if other is not buffer]

    def abandon(self) -> None:
        """Forget the copies out of the buffers, after an exception."""
        for buffer in self._buffers:
            buffer.ticket = None

    def nbytes(self) -> int:
        """Return the bytes of device memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def release(self) -> None:
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


def few_landing_buffers(units: int, together: int) -> int:
    """Return how many landing buffers there may be on any host; there are more where it has memory to spare.

    Args:
        units: Number of units.
        together: Number of units that travel together.
    """
    return max(2, together + 1, -(-units // _UNITS_PER_BUFFER))


class LandingBuffers:
    """Buffers that are used again and again; a new one is made only if no other is free.

    Args:
        backend: Pins the memory.
        pin: Whether to pin it.
        few: Number of buffers that there may always be.
    """

    def __init__(self, backend: Backend, pin: bool, few: int) -> None:
        self._backend = backend
        self._pin = pin
        self._few = few
        self._buffers: list[LandingBuffer] = []
        self._released = threading.Condition()

    def take(self, nbytes: int, patient: bool = False) -> LandingBuffer:
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

    def take_over(self, host: HostBuffer) -> None:
        """Make a buffer of memory that was used otherwise if all others are in use; release it if not."""
        with self._released:
            if not self._free() and self._may_grow(0, patient=False):
                self._add(host)
            else:
                host.release()

    def _find(self, nbytes: int, patient: bool) -> LandingBuffer | None:
        """Find the smallest free buffer that is large enough, or make one; None if there may not be more."""
        free = self._free()
        large_enough = next((buffer for buffer in free if buffer.memory.nbytes >= nbytes), None)
        if large_enough is not None:
            return large_enough
        if free:
            self._buffers.remove(free[-1])
            free[-1].host.release()
        elif not self._may_grow(nbytes, patient):
            return None
        return self._add(HostBuffer(nbytes, self._backend, self._pin))

    def _free(self) -> list[LandingBuffer]:
        """Return the buffers that are free, the smallest first."""
        return sorted((buffer for buffer in self._buffers if buffer.is_free), key=lambda buffer: buffer.memory.nbytes)

    def _may_grow(self, nbytes: int, patient: bool) -> bool:
        return len(self._buffers) < self._few or (not patient and _is_left_over(nbytes))

    def _add(self, host: HostBuffer) -> LandingBuffer:
        self._buffers.append(LandingBuffer(host, self._released))
        return self._buffers[-1]

    def abandon(self) -> None:
        """Release all buffers, after an exception."""
        for buffer in self._buffers:
            buffer.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def release(self) -> None:
        """Release the memory, when no copy is under way."""
        while self._buffers:
            self._buffers.pop().host.release()


def _is_left_over(nbytes: int) -> bool:
    """Tell whether the host has so much memory to spare."""
    free, total = available_host_memory(), total_host_memory()
    return free is not None and total is not None and free - nbytes >= _LEFT_FREE * total


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host.

    Attributes:
        unit: The unit.
        weights: Those of its weights that the gradients belong to.
        arrived: The tensors that the gradients land in, one for each weight.
        ticket: The copy, or the addition, that brings them.
        buffer: The landing buffer to release when they have been read; None if they land where they stay.
    """

    unit: Unit
    weights: Sequence[Weight]
    arrived: Sequence[Tensor]
    ticket: Ticket
    buffer: LandingBuffer | None
