"""The routes of gradients from the device to the host; the stream chooses one for what a unit has gathered (stream.py).

    device                        on its way           host
    leaf.grad -> staging buffer ---------------------> memory beside the masters    keep
      |                |--------> landing buffer ----> added to what is there       add
      |                |--------> landing buffer ----> the optimizer                pass_to_step
      |                `-- its share of all processes' --> memory that they share  processes/averages.py
      `---------------------------------------- (its norm alone, if it is measured) stay

A unit's gradients are put together in a *staging buffer* on the device, and leave it with one copy. Those that do not
stay where they land go through a *landing buffer* on the host, on their way into a sum or into the optimizer. There are
few, of fixed sizes: they limit how far work on the host may fall behind.

What lands in memory beside the masters brings its norms, if these are measured; norms of sums are measured there. What
stays is read there when the unit visits, or brought home if somebody needs it on the host before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.segment_gradients import (
    Gradient,
    GradientMemory,
    LandingBuffer,
    SegmentGradients,
)  # fmt: skip
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer, tensor_in
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, gradient_bytes
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

    def release(self) -> None:
        """Let go of buffers that have grown; computing waits for the copies out of them."""
        for buffer in self._buffers:
            if buffer.ticket is not None:
                self._backend.trace.wait(buffer.ticket, "gradients")
        self._buffers.clear()

    def take(self, nbytes: int) -> GradientMemory:
        """Return the next buffer, of at least `nbytes`; computing waits until the last copy out of it is done."""
        self.reserve()
        buffer = self._buffers[0]
        # if this wait fails, so does the step, and what comes after that finds nothing under way
        copy, buffer.ticket = buffer.ticket, None
        if copy is not None:
            self._backend.trace.wait(copy, "gradients")
        if buffer.bytes.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            buffer = GradientMemory(self._backend.allocate(nbytes))
        self._buffers = [*self._buffers[1:], buffer]
        return buffer

    def nbytes(self) -> int:
        """Return the bytes of device memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers.clear()
        self.count = STAGING_BUFFERS


def landing_buffers(units: int) -> int:
    """Return how many landing buffers there are, for so many units."""
    return max(2, -(-units // _UNITS_PER_BUFFER))


class LandingBuffers:
    """Host memory through which gradients pass: buffers of the sizes of the largest units, made when first needed."""

    _sizes: list[int]  # the smallest first

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: list[LandingBuffer] = []
        self._released = threading.Condition()

    def serve(self, units: Sequence[Unit]) -> None:
        """Have buffers for these units, from when one is needed."""
        sizes = sorted(gradient_bytes(unit.weights) for unit in units)
        self._sizes = sizes[-landing_buffers(len(units)) :]

    def make_room(self, nbytes: int) -> None:
        """Have a buffer for so much, too, in place of the smallest, before the first is taken."""
        self._sizes = sorted([*self._sizes, nbytes])[1:]

    def take(self, nbytes: int) -> LandingBuffer:
        """Take the smallest buffer that is large enough; block until it is free."""
        with self._released:
            if not self._buffers:
                made = [HostBuffer(size, self._backend, pin=True) for size in self._sizes]
                self._buffers = [LandingBuffer(buffer, self._released) for buffer in made]
            # some weights were frozen, or lowered; it is used once
            if nbytes > self._buffers[-1].bytes.nbytes:
                return LandingBuffer(HostBuffer(nbytes, self._backend, pin=False), self._released)
            self._released.wait_for(lambda: self._fitting(nbytes))
            buffer = self._fitting(nbytes)[0]
            buffer.is_free = False
            return buffer

    def _fitting(self, nbytes: int) -> list[LandingBuffer]:
        return [buffer for buffer in self._buffers if buffer.is_free and buffer.bytes.nbytes >= nbytes]

    def abandon(self) -> None:
        """Release all buffers, after an exception."""
        for buffer in self._buffers:
            buffer.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory, when no copy is under way; what lies in it keeps it."""
        while self._buffers:
            self._buffers.pop().host.release()


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

    def __init__(self, window: Window) -> None:
        self.measures_norms = False  # whether each gradient brings its norm
        self.staging = StagingBuffers(window.units, window.backend)
        self.landing = LandingBuffers(window.backend)
        self._backend = window.backend
        self._stats = window.stats

    def keep(self, of_segment: SegmentGradients) -> None:
        """Have gradients land in the unit's own memory, where they stay, with their norms if these are measured."""
        of_segment.wait()  # for what was there
        gathered = of_segment.take_gathered()
        memory = of_segment.make_arrived()
        has_norms = self.measures_norms and of_segment.layout.norm_dtype is not None
        self._download(of_segment, gathered, memory, has_norms)
        of_segment.come_to(memory, gathered, has_norms)

    def pass_to_step(self, of_segment: SegmentGradients) -> None:
        """Have gradients land for the optimizer, which steps the unit with them and needs none that are kept."""
        of_segment.release_memory()  # gradients pass through a few buffers from now on
        of_segment.land_in(self._land(of_segment))

    def add(self, of_segment: SegmentGradients) -> None:
        """Have gradients land in a buffer, and be added to those that are there."""
        before = {gradient: gradient.tensor for gradient in of_segment.gathered}
        earlier = of_segment.ticket
        totals = of_segment.make_sums()  # which may wait for these
        buffer = self._land(of_segment)
        norm_dtype = of_segment.layout.norm_dtype if self.measures_norms else None
        sums: list[_Sum] = []
        for gradient, summed in before.items():
            landed, total = gradient.tensor, totals[gradient]
            assert landed is not None
            norm = None
            if norm_dtype is not None:
                norm = torch.empty((), dtype=torch.float32, device="cpu")
            gradient.come(total, norm)
            sums.append(_Sum(total, summed, landed, norm))
        moved = 2 * sum(of_weight.total.nbytes for of_weight in sums)
        after = [ticket for ticket in (earlier, of_segment.ticket) if ticket is not None]
        job = Job(partial(_add_up, sums, norm_dtype), after, moved, buffer.release)
        of_segment.wait_for(self._backend.trace.work(Kind.ADD, of_segment.unit.name, job))

    def stay(self, of_segment: SegmentGradients) -> None:
        """Have gradients stay where they are until the unit visits; their norms leave, if these are measured."""
        of_segment.release_memory()  # that nobody needs, and wait for norms that were there
        of_segment.stay()
        gathered = of_segment.take_gathered()
        for gradient, tensor in gathered.items():
            like = gradient.weight.layout
            if tensor.stride() != like.stride():  # a step reads it in the order of memory
                tensor = tensor.new_empty_strided(like.size(), like.stride()).copy_(tensor)
            gradient.come(tensor)
        layout = of_segment.layout
        if self.measures_norms and layout.norm_dtype is not None:
            staging = self.staging.take(layout.nbytes)
            _, measured = staging.views(layout)
            norms = torch._foreach_norm(list(gathered.values()), 2, layout.norm_dtype)
            torch.stack(norms, out=measured)
            memory = of_segment.segment.memory.get_beside("norms", measured.nbytes, pin=True).bytes
            self.leave(of_segment, memory, staging, layout.norms_at)
            landed = tensor_in(memory, 0, measured, torch.float32)
            for gradient, norm in zip(gathered, landed, strict=True):
                gradient.norm = norm

    def bring_home(self, of_segment: SegmentGradients) -> None:
        """Have gradients that have stayed on the device land after all."""
        of_segment.gather_again()
        self.keep(of_segment)

    # ---------------------------------------------------------------------------------------------- parts of the ways

    def _land(self, of_segment: SegmentGradients) -> LandingBuffer:
        """Have gradients land in a buffer, and return it to whoever reads them there."""
        gathered = of_segment.take_gathered()
        buffer = self.landing.take(of_segment.layout.nbytes)
        self._download(of_segment, gathered, buffer, has_norms=False)
        of_segment.come_to(buffer, gathered, has_norms=False)
        return buffer

    def _download(
        self,
        of_segment: SegmentGradients,
        gathered: Mapping[Gradient, Tensor],
        memory: GradientMemory,
        has_norms: bool,
    ) -> None:
        """Copy gradients to the host, and with them their norms where they land in memory of their own."""
        layout = of_segment.layout
        staging = self.staging.take(layout.nbytes)
        tensors, norms = staging.views(layout)
        places = dict(zip(of_segment.trained, tensors, strict=True))
        torch._foreach_copy_([places[gradient] for gradient in gathered], list(gathered.values()))
        nbytes = layout.norms_at
        if has_norms:  # also of those that have not come
            torch.stack(torch._foreach_norm(tensors, 2, layout.norm_dtype), out=norms)
            nbytes = layout.nbytes
        self.leave(of_segment, memory.bytes[:nbytes], staging)

    def leave(
        self,
        of_segment: SegmentGradients,
        target: Tensor,
        staging: GradientMemory,
        begin: int = 0,
    ) -> Ticket:
        """Copy a part of a staging buffer to the host."""
        source = staging.bytes[begin : begin + target.nbytes]
        ticket = self._backend.trace.download(Kind.GRADIENTS, of_segment.unit.name, target, source)
        staging.ticket = ticket
        of_segment.wait_for(ticket)
        self._stats.bytes_to_host += target.nbytes
        return ticket
