"""The routes of gradients from the device to the host; the stream chooses one for each shipment (stream.py).

    device                        on its way           host
    leaf.grad -> staging buffer ---------------------> memory beside the masters    keep
      |                |--------> landing buffer ----> added to what is there       add
      |                |--------> landing buffer ----> the optimizer                pass_to_step
      |                `-- its share of all processes' --> memory that they share  processes/averages.py
      `---------------------------------------- (its norm alone, if it is measured) stay

A unit's gradients are put together in a *staging buffer* on the device, and leave it with one copy. Those that do not
stay where they land go through a *landing buffer* on the host, on their way into a sum or into the optimizer.

What lands in memory beside the masters brings its norms, if these are measured; norms of sums are measured there. What
stays is read there when the unit visits, or brought home if somebody needs it on the host before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, GradientMemory, SegmentGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer, as_bytes, tensor_in
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, GradientLayout, gradient_bytes
from sp_lightning.pipeline.window.window import Window

_UNITS_PER_BUFFER = 5  # landing buffers limit how far the optimizer may fall behind


class StagingBuffers:
    """Device memory in which units' gradients are put together: buffers that take turns, each large enough for any."""

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._buffers: list[GradientMemory] = []
        self.count = STAGING_BUFFERS

    def reserve(self) -> None:
        """Allocate the buffers before a step: during it they would split memory that activations need in one piece."""
        if self._buffers:
            return
        nbytes = max((gradient_bytes(unit.weights) for unit in self._units), default=0)
        if nbytes:
            for _ in range(self.count):
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
        self.count = STAGING_BUFFERS


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


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host."""

    of_segment: SegmentGradients
    gradients: Sequence[Gradient]
    gathered: list[Tensor]  # as they are on the device, until they are packed
    layout: GradientLayout  # how they lie in memory
    is_new: bool  # whether the engine had nothing of them before
    is_watched: bool  # whether somebody would see how one of them is added up
    tensors: Sequence[Tensor] = field(init=False)  # what they land in, or are added to
    # the copy, or the addition, that brings them there; None if they stay, and nothing is on its way
    ticket: Ticket | None = None
    # the landing buffer to release when they have been read; None if they are where they stay
    buffer: LandingBuffer | None = None


class _Sum(NamedTuple):
    """A sum of gradients of one weight."""

    total: Tensor
    before: Tensor | None  # what it begins with: itself, what came first, or nothing
    added: Tensor
    norm: Tensor | None  # where its norm goes, if that is measured


def _add_up(sums: Sequence[_Sum], norm_dtype: torch.dtype | None) -> None:
    """Add gradients that have landed to those that are there, or begin with them."""
    with without_torch_function(), torch.no_grad():
        for total, before, added, norm in sums:
            if before is None:
                total.copy_(added)
            else:
                if before is not total:
                    total.copy_(before)
                add(total, added)
            if norm is not None:
                norm.copy_(torch.linalg.vector_norm(total, dtype=norm_dtype))


class Routes:
    """Sends units' gradients to the host, each in one copy and in the dtype they were computed in."""

    def __init__(self, window: Window, staging: StagingBuffers, landing: LandingBuffers) -> None:
        self.measures_norms = False  # whether each gradient brings its norm
        self.staging = staging
        self.landing = landing
        self._backend = window.backend
        self._stats = window.stats

    def gather(self, of_segment: SegmentGradients) -> Shipment:
        """Take what a unit has gathered."""
        tensors: dict[Gradient, Tensor] = {}
        is_new = True
        for gradient in of_segment.trained:
            if gradient in of_segment.gathered:
                tensors[gradient] = of_segment.gathered[gradient]
                gradient.norm = None
                is_new &= gradient.tensor is None
        layout = of_segment.lay_out(tensors)
        is_watched = of_segment.is_watched
        shipment = Shipment(of_segment, list(tensors), list(tensors.values()), layout, is_new, is_watched)
        of_segment.forget_gathered()
        return shipment

    def stay(self, shipment: Shipment) -> None:
        """Have gradients stay where they are until the unit visits; their norms leave, if these are measured."""
        of_segment = shipment.of_segment
        of_segment.release_memory()  # that nobody needs, and wait for norms that were there
        of_segment.is_on_device = True
        norm_dtype = shipment.layout.norm_dtype
        norms: Sequence[Tensor | None] = [None] * len(shipment.gradients)
        if self.measures_norms and norm_dtype is not None:
            norms = self._download_norms(shipment, norm_dtype)
        tensors: list[Tensor] = []
        for gradient, tensor, norm in zip(shipment.gradients, shipment.gathered, norms, strict=True):
            layout = gradient.weight.layout
            if tensor.stride() != layout.stride():  # a step reads it in the order of memory
                tensor = tensor.new_empty_strided(layout.size(), layout.stride()).copy_(tensor)
            gradient.tensor = tensor
            gradient.norm = norm
            tensors.append(tensor)
        shipment.tensors = tensors

    def _download_norms(self, shipment: Shipment, norm_dtype: torch.dtype) -> list[Tensor]:
        of_segment = shipment.of_segment
        measured = torch.stack(torch._foreach_norm(shipment.gathered, 2, norm_dtype)).float()
        memory = of_segment.segment.memory.get_beside("norms", measured.nbytes, pin=True).bytes
        name = of_segment.unit.name
        source = as_bytes(measured)
        shipment.ticket = self._backend.trace.download(Kind.GRADIENTS, name, memory, source)
        of_segment.leaving_norms = measured
        return list(tensor_in(memory, 0, measured, torch.float32))

    def bring_home(self, of_segment: SegmentGradients) -> None:
        """Have gradients that have stayed on the device land after all, which the host waits for: it is rare."""
        for gradient in of_segment.gradients:
            if gradient.tensor is not None:
                landed = torch.empty_like(gradient.weight.host, dtype=gradient.tensor.dtype)
                self._backend.download(as_bytes(landed), as_bytes(gradient.tensor)).join()
                gradient.tensor = of_segment.room_for(gradient, landed.dtype).copy_(landed)
        of_segment.is_on_device = False
        self._stats.host_syncs += 1

    def keep(self, shipment: Shipment) -> None:
        """Have gradients land in the unit's own memory, where they stay, with their norms if these are measured."""
        of_segment = shipment.of_segment
        layout = shipment.layout
        of_segment.wait()  # for what was there
        memory = of_segment.own()
        has_norms = self.measures_norms and layout.norm_dtype is not None
        self._download(shipment, memory, has_norms)
        shipment.tensors, norms = memory.views(layout)
        for index, gradient in enumerate(shipment.gradients):
            gradient.tensor = shipment.tensors[index]
            gradient.norm = norms[index] if has_norms else None

    def land(self, shipment: Shipment) -> None:
        """Have gradients land in a buffer, for who reads them there."""
        shipment.buffer = self.landing.take(shipment.layout.nbytes)
        self._download(shipment, shipment.buffer)
        shipment.tensors, _ = shipment.buffer.views(shipment.layout)

    def pass_to_step(self, shipment: Shipment) -> None:
        """Have gradients land for the optimizer, which steps the unit with them and needs none that are kept."""
        self.land(shipment)
        shipment.of_segment.release_memory()  # gradients pass through a few buffers from now on

    def add(self, shipment: Shipment, measures_norms: bool) -> None:
        """Have the thread for work on host memory add gradients that land in a buffer to those that are there."""
        of_segment = shipment.of_segment
        buffer = shipment.buffer
        assert buffer is not None
        norm_dtype = of_segment.layout.norm_dtype if measures_norms else None
        sums: list[_Sum] = []
        # those that came in their master's dtype move to where all of the unit's sums lie together
        is_first = of_segment.kept_as is not of_segment.sum_layout
        for gradient, arriving in zip(shipment.gradients, shipment.tensors, strict=True):
            before = gradient.tensor
            if before is None or is_first or before.dtype != gradient.weight.dtype:
                gradient.tensor = of_segment.room_for(gradient, arriving.dtype)
            assert gradient.tensor is not None
            if norm_dtype is not None:
                gradient.norm = torch.empty((), dtype=torch.float32, device="cpu")
            sums.append(_Sum(gradient.tensor, before, arriving, gradient.norm))
        shipment.tensors = [of_weight.total for of_weight in sums]
        moved = 2 * sum(total.nbytes for total in shipment.tensors)
        after = [ticket for ticket in (shipment.ticket, of_segment.ticket) if ticket is not None]
        name = of_segment.unit.name
        job = partial(_add_up, sums, norm_dtype)
        trace = self._backend.trace
        shipment.ticket = trace.work(Kind.ADD, name, job, after, moved, buffer.release)
        shipment.buffer = None

    def _download(self, shipment: Shipment, memory: GradientMemory, has_norms: bool = False) -> None:
        """Copy gradients to the host, and with them their norms where they land in memory of their own."""
        layout = shipment.layout
        staging = self.staging.take(layout.nbytes)
        torch._foreach_copy_(staging.views(layout)[0], shipment.gathered)
        shipment.gathered = []
        nbytes = layout.norms_at
        if has_norms:
            tensors, norms = staging.views(layout)
            torch.stack(torch._foreach_norm(tensors, 2, layout.norm_dtype), out=norms)
            nbytes = layout.nbytes
        target = memory.bytes[:nbytes]
        source = staging.bytes[:nbytes]
        name = shipment.of_segment.unit.name
        ticket = self._backend.trace.download(Kind.GRADIENTS, name, target, source)
        shipment.ticket = staging.ticket = ticket
        self._stats.bytes_to_host += nbytes

    def abandon(self) -> None:
        """Free the buffers that gradients land in, after an exception."""
        self.landing.abandon()
