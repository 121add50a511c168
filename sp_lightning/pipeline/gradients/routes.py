"""The routes of gradients from the device to the host; the stream chooses one for each shipment (stream.py).

    device                        on its way           host
    leaf.grad -> staging buffer ---------------------> memory beside the masters    keep
      |                |--------> landing buffer ----> added to what is there       add
      |                |--------> landing buffer ----> the optimizer                pass_to_step
      |                `--------> landing buffer ----> the sum of all processes     the exchange's `add`
      `---------------------------------------- (its norm alone, if it is measured) stay

What lands in memory beside the masters brings its norms, if these are measured; norms of sums are measured there. What
stays is read there when the unit visits, or brought home if somebody needs it on the host before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.buffers import (
    GradientMemory,
    LandingBuffer,
    LandingBuffers,
    StagingBuffers,
)
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.buffers import as_bytes, tensor_in
from sp_lightning.pipeline.weights.segment import GradientLayout
from sp_lightning.pipeline.window.window import Window


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

    def add_up(self) -> None:
        """Add to what is there, or begin with it."""
        if self.before is None:
            self.total.copy_(self.added)
            return
        if self.before is not self.total:
            self.total.copy_(self.before)
        add(self.total, self.added)


@dataclass(eq=False)
class _Addition:
    """A job: gradients that have landed are added to those that are there."""

    sums: Sequence[_Sum]
    norm_dtype: torch.dtype | None

    def __call__(self) -> None:
        with without_torch_function(), torch.no_grad():
            for of_weight in self.sums:
                of_weight.add_up()
                if of_weight.norm is not None:
                    norm = torch.linalg.vector_norm(of_weight.total, dtype=self.norm_dtype)
                    of_weight.norm.copy_(norm)


class Routes:
    """Sends units' gradients to the host, each in one copy and in the dtype they were computed in."""

    def __init__(self, window: Window, staging: StagingBuffers, landing: LandingBuffers) -> None:
        self.measures_norms = False  # whether each gradient brings its norm
        self.staging = staging
        self._landing = landing
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
                empty = torch.empty_strided(layout.size(), layout.stride(), dtype=tensor.dtype, device=tensor.device)
                tensor = empty.copy_(tensor)
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
                gradient.tensor = landed
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
        shipment.buffer = self._landing.take(shipment.layout.nbytes)
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
        addition = _Addition(sums, norm_dtype)
        trace = self._backend.trace
        shipment.ticket = trace.work(Kind.ADD, name, addition, after, moved, buffer.release)
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
        self._landing.abandon()
