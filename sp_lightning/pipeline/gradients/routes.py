"""The routes of gradients from the device to the host; the stream chooses one for each parcel (stream.py).

device                        on its way                  host
leaf.grad -> staging buffer ----------------------------> the unit's own buffer        keep
-----------------> landing buffer ---> added to what is there       add
-----------------> landing buffer ---> the optimizer                pass_to_step
-----------------> landing buffer ---> the sum of all processes     the exchange's `add`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.buffers import GradientMemory, LandingBuffer, LandingBuffers, StagingBuffers
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, UnitGradients
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.gradient_layout import GradientLayout
from sp_lightning.pipeline.window.window import Window


@dataclass(eq=False)
class Parcel:
    """Gradients of a unit, put together in device memory.

    Attributes:
        layout: How they lie there.
        staging: The memory.
        is_new: Whether the engine had nothing of them before.
        is_watched: Whether somebody would see how one of them is added up.
    """

    unit: UnitGradients
    gradients: Sequence[Gradient]
    layout: GradientLayout
    staging: GradientMemory
    is_new: bool
    is_watched: bool


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host."""

    unit: UnitGradients
    gradients: Sequence[Gradient]  # those that are on their way
    tensors: Sequence[Tensor]  # what they land in
    ticket: Ticket  # the copy, or the addition, that brings them
    # the landing buffer to release when they have been read; None if they land where they stay
    buffer: LandingBuffer | None = None


@dataclass(eq=False)
class _Sum:
    """A sum of gradients of one weight."""

    total: Tensor
    before: Tensor | None  # what it begins with: itself, what came first, or nothing
    added: Tensor
    norm: Tensor | None  # where its norm goes, if that is measured

    def add_up(self) -> None:
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
            for each in self.sums:
                each.add_up()
            for each in self.sums:
                if each.norm is not None:
                    each.norm.copy_(torch.linalg.vector_norm(each.total, dtype=self.norm_dtype))


class Routes:
    """Sends units' gradients to the host, each in one copy and in the dtype they were computed in."""

    def __init__(self, window: Window, staging: StagingBuffers, landing: LandingBuffers) -> None:
        self.measures_norms = False  # whether each gradient brings its norm
        self._backend = window.backend
        self._stats: Stats = window.stats
        self._staging = staging
        self._landing = landing

    def pack(self, unit: UnitGradients) -> Parcel:
        """Put what a unit has gathered into a staging buffer."""
        gathered = unit.gathered
        tensors = {gradient: gathered[gradient] for gradient in unit.trained if gradient in gathered}
        layout = unit.lay_out(tensors)
        staging = self._staging.take(layout.nbytes)
        torch._foreach_copy_(staging.views(layout)[0], list(tensors.values()))
        is_new = True
        for gradient in tensors:
            gradient.norm = None
            is_new &= gradient.host is None
        parcel = Parcel(unit, list(tensors), layout, staging, is_new, unit.is_watched)
        unit.forget_gathered()
        return parcel

    def keep(self, parcel: Parcel) -> Shipment:
        """Have gradients land in the unit's own memory, where they stay, with their norms if these are measured."""
        unit, layout = parcel.unit, parcel.layout
        unit.wait()  # for what was there
        memory = unit.own()
        tensors, norms = memory.views(layout)
        has_norms = self.measures_norms and layout.norm_dtype is not None
        ticket = self._download(parcel, memory, has_norms)
        for index, gradient in enumerate(parcel.gradients):
            gradient.host = tensors[index]
            gradient.norm = norms[index] if has_norms else None
        return Shipment(unit, parcel.gradients, tensors, ticket)

    def land(self, parcel: Parcel) -> Shipment:
        """Have gradients land in a buffer, for who reads them there."""
        buffer = self._landing.take(parcel.layout.nbytes)
        ticket = self._download(parcel, buffer)
        return Shipment(parcel.unit, parcel.gradients, buffer.views(parcel.layout)[0], ticket, buffer)

    def pass_to_step(self, parcel: Parcel) -> Shipment:
        """Have gradients land for the optimizer, which steps the unit with them and needs none that are kept."""
        shipment = self.land(parcel)
        parcel.unit.release_memory()  # gradients pass through a few buffers from now on
        return shipment

    def add(self, shipment: Shipment, measures_norms: bool) -> Shipment:
        """Have the thread for work on host memory add gradients that land in a buffer to those that are there."""
        unit, buffer = shipment.unit, shipment.buffer
        assert buffer is not None
        norm_dtype = unit.layout.norm_dtype if measures_norms else None
        sums: list[_Sum] = []
        for gradient, arriving in zip(shipment.gradients, shipment.tensors, strict=True):
            before = gradient.host
            if before is None or before.dtype != gradient.weight.dtype:
                gradient.host = unit.room_for(gradient, arriving.dtype)
            assert gradient.host is not None
            if norm_dtype is not None:
                gradient.norm = torch.empty((), dtype=torch.float32, device="cpu")
            sums.append(_Sum(gradient.host, before, arriving, gradient.norm))
        moved = 2 * sum(each.total.nbytes for each in sums)
        after = [shipment.ticket] if unit.ticket is None else [shipment.ticket, unit.ticket]
        job = _Addition(sums, norm_dtype)
        ticket = self._backend.trace.work(Kind.ADD, unit.unit.name, job, after, moved, buffer.release)
        return Shipment(unit, shipment.gradients, [each.total for each in sums], ticket)

    def _download(self, parcel: Parcel, memory: GradientMemory, has_norms: bool = False) -> Ticket:
        """Copy gradients to the host, and with them their norms where they land in memory of their own."""
        layout, staging = parcel.layout, parcel.staging
        nbytes = layout.norms_at
        if has_norms:
            tensors, norms = staging.views(layout)
            torch.stack(torch._foreach_norm(tensors, 2, layout.norm_dtype), out=norms)
            nbytes = layout.nbytes
        target, source = memory.bytes[:nbytes], staging.bytes[:nbytes]
        ticket = self._backend.trace.download(Kind.GRADIENTS, parcel.unit.unit.name, target, source)
        staging.ticket = ticket
        self._stats.bytes_to_host += nbytes
        return ticket

    def abandon(self) -> None:
        """Free the buffers that gradients land in, after an exception."""
        self._landing.abandon()
