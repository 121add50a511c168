"""The routes of gradients from the device to the host; the stream chooses one for a unit's gradients (stream.py).

    device                        on its way           host
    leaf.grad -> staging buffer ---------------------> memory beside the masters    KEEP
      |                |--------> landing buffer ----> added to what is there       ADD
      |                |--------> landing buffer ----> the optimizer                PASS_TO_STEP
      |                `-- its share of all processes' --> memory that they share   processes/averages.py
      `--------------------------------- (its norm alone, if it is measured)        STAY, and be added up

A unit's gradients are put together in a *staging buffer* on the device, and leave it with one copy. Those that do not
stay where they land go through a *landing buffer* on the host, on their way into a sum or into the optimizer. There are
few such buffers, of fixed sizes (gradient_memory.py): they limit how far work on the host may fall behind.

If norms are measured, gradients that land in memory next to the masters bring theirs; norms of sums are measured there.
Gradients that stay are read there when the unit visits, or go to the host when the optimizer needs them.

[Note: gradients that wait]
Gradients wait on the device until their unit is updated, where host memory has no room for them. Clipping by norm keeps
all gradients of a step, accumulation keeps their sums. Where host memory cannot hold these, they stay on the device,
are added up there, and go to the host when the optimizer updates their unit:

    backward    leaf.grad -> added to what waits                   device
    step()      what waits -> landing buffer -> the optimizer      host, in a lane beside computing

Before there is a plan, backward decides: by then it is known how much of the device a step takes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.gradient_memory import (
    GradientMemory,
    LandingBuffer,
    LandingBuffers,
    StagingBuffers,
)
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients, Stored
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, is_out_of_memory
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind, Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.pipeline.torch_private import alias_count
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.segment import GradientLayout, HostMemory, norm_dtype_of
from sp_lightning.pipeline.window.window import Window


class SpareMemory(Protocol):
    """Knows how much of the device a step leaves to gradients (engine.py)."""

    def left_for_gradients(self) -> float:
        """Return the bytes that are free, and stay free if the step takes no more than it has so far."""


class WaitingGradients:
    """Decides whose gradients wait on the device.

    Attributes:
        host_bytes: The host memory that gradients may take before there is a plan; infinite where nothing has to wait.
        landing_bytes: The host memory through which gradients pass that have waited.
        planned: The names of units whose gradients wait; None if there is no plan yet.
        waited: The names of units whose gradients have waited since the last plan.
    """

    def __init__(self, memory: HostMemory, device: SpareMemory) -> None:
        self.landing_bytes = 0
        self.host_bytes = math.inf
        self.planned: Collection[str] | None = None
        self.waited: set[str] = set()
        self._memory = memory
        self._device = device

    @property
    def is_limited(self) -> bool:
        """Whether the host may lack room for gradients."""
        return math.isfinite(self.host_bytes)

    @property
    def may_happen(self) -> bool:
        """Whether any gradients may wait: by the plan, or because the host may lack room."""
        return self.is_left_to_backward or bool(self.planned)

    @property
    def is_left_to_backward(self) -> bool:
        """Whether backward decides whose gradients wait, as the host may lack room and there is no plan."""
        return self.is_limited and self.planned is None

    def limit(self, host_bytes: float, is_first: bool = True) -> None:
        """Limit the host memory that gradients take before there is a plan.

        Before the first step of an optimizer the smallest limit holds, as not all limits consider its state. Later
        limits follow the memory that is free.
        """
        self.host_bytes = min(self.host_bytes, host_bytes) if is_first else host_bytes

    def follow_plan(self, planned: Collection[str] | None) -> None:
        """Have the gradients of these units wait; None leaves it to backward."""
        if planned != self.planned:
            self.planned = planned
            self.waited.clear()

    def admits(self, of_segment: SegmentGradients, more_comes: bool) -> bool:
        """Tell whether a unit's first gradients wait on the device; with `more_comes` others will be added to them.

        Raises:
            RuntimeError: Neither the host nor the device has room for them.
        """
        name = of_segment.unit.name
        if self.planned is not None:
            waits = name in self.planned
        elif of_segment.memory_beside_masters.memory is not None:  # the gradients have their memory on the host
            waits = False
        else:
            nbytes = of_segment.sum_layout.nbytes if more_comes else of_segment.layout.nbytes
            left_on_host = self.host_bytes - self._memory.nbytes_for("gradients") - self.landing_bytes
            waits = nbytes > left_on_host
            if waits:
                left_on_device = self._device.left_for_gradients()
                if nbytes > left_on_device:
                    raise _no_room(name, nbytes, left_on_host, left_on_device)
        if waits:
            self.waited.add(name)
        return waits


def _no_room(name: str, nbytes: int, on_host: float, on_device: float) -> RuntimeError:
    left_on_host = readable_bytes(max(0, int(on_host)))
    left_on_device = readable_bytes(max(0, int(on_device)))
    return RuntimeError(
        f"Neither CPU nor GPU memory has room for the gradients of {name!r}: {readable_bytes(nbytes)} are needed, "
        f"{left_on_host} of CPU memory and {left_on_device} of GPU memory are left. Train without clipping or "
        "accumulation, with smaller batches, adapters (LoRA) or `sp_lightning.optim.AdamW(moments='int8')`, or on a "
        "machine with more "
        "memory; `sp-lightning plan` says what fits."
    )


def add_on_device(gradient: Gradient, tensor: Tensor, more_comes: bool) -> None:
    """Add a gradient to the one that waits on the device, in the master's dtype, as autograd would; or begin with it.

    With `more_comes` the first gradient is copied, because sums are written in place. A gradient that shares its memory
    is copied, too: a Function may return a view of a weight, whose place another unit gets.
    """
    before, like = gradient.tensor, gradient.weight.layout
    if before is not None:
        total = before.to(gradient.weight.dtype, copy=not gradient.is_sum)
        gradient.set_tensor(total.add_(tensor), is_on_device=True, is_sum=True)
    # an update reads it in the order of memory
    elif more_comes or tensor.stride() != like.stride() or not _is_alone(tensor):
        dtype = gradient.weight.dtype if more_comes else tensor.dtype
        copied = tensor.new_empty_strided(like.size(), like.stride(), dtype=dtype).copy_(tensor)
        gradient.set_tensor(copied, is_on_device=True, is_sum=more_comes)
    else:
        gradient.set_tensor(tensor, is_on_device=True)


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether a tensor is alone in its storage, and fills it."""
    return alias_count(tensor) == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes


def move_to_host(of_segment: SegmentGradients) -> None:
    """Move gradients that wait to the host, one by one: the device has run out of memory."""
    for gradient, tensor in of_segment.stored_tensors.items():
        gradient.set_tensor(tensor.cpu(), gradient.norm)


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


class _Sum(NamedTuple):
    """A sum of gradients of one weight."""

    total: Tensor
    # The sum begins with this: with itself, with the first gradient, or with nothing.
    before: Tensor | None
    added: Tensor
    norm: Tensor | None  # the sum's norm is written here; None if it is not measured


def _add_up(sums: Sequence[_Sum], norm_dtype: torch.dtype | None) -> None:
    """Add gradients that have landed to earlier ones, or begin a sum with them."""
    with untracked():
        for total, before, added, norm in sums:
            if before is None:
                total.copy_(added)
            else:
                if before is not total:
                    total.copy_(before)
                add(total, added)
            if norm is not None:
                norm.copy_(torch.linalg.vector_norm(total, dtype=norm_dtype))


class Route(enum.Enum):
    """The route of the gradients that a unit has gathered, drawn above."""

    KEEP = enum.auto()
    ADD = enum.auto()
    PASS_TO_STEP = enum.auto()
    STAY = enum.auto()


class Arrival(NamedTuple):
    """The facts that decide on the route of the gradients that a unit has gathered."""

    stored: Stored  # the place of earlier gradients
    has_sums: bool  # whether the unit has memory for sums of another dtype
    is_updated_on_device: bool  # whether an update on the device comes next
    is_used_at_once: bool  # whether a step in backward uses them, and needs them no longer


def route_of(arrival: Arrival) -> Route:
    """Choose a route, as if the host had room for all gradients: the first that applies.

    earlier ones are on the device                          STAY
    earlier ones are on the host                            ADD
    an update on the device comes next                      STAY
    a step in backward uses them, and needs them no longer  PASS_TO_STEP
    the unit has memory for sums of another dtype           ADD
    else                                                    KEEP
    """
    if arrival.stored is Stored.ON_DEVICE:
        return Route.STAY
    if arrival.stored is Stored.ON_HOST:
        return Route.ADD
    if arrival.is_updated_on_device and not arrival.has_sums:
        return Route.STAY
    if arrival.is_used_at_once:
        return Route.PASS_TO_STEP
    return Route.ADD if arrival.has_sums else Route.KEEP


class Routes:
    """Sends units' gradients to the host, each in one copy and in the dtype they were computed in."""

    def __init__(self, window: Window, waiting: WaitingGradients) -> None:
        self.measures_norms = False  # whether each gradient brings its norm
        self.staging = StagingBuffers(window.units, window.backend)
        self.landing = LandingBuffers(window.backend, waiting)
        self._backend = window.backend
        self._stats = window.stats

    def send(self, of_segment: SegmentGradients, route: Route, more_comes: bool) -> None:
        """Send the gathered gradients by a route; `more_comes` tells whether others are expected, to be added."""
        if route is Route.KEEP:
            self._keep(of_segment)
        elif route is Route.ADD:
            self._add(of_segment)
        elif route is Route.PASS_TO_STEP:
            # The optimizer does not keep them. From now on gradients pass through a few buffers.
            of_segment.release_memory()
            of_segment.landing = self._land(of_segment)
        else:
            self._stay(of_segment, more_comes)

    def _keep(self, of_segment: SegmentGradients) -> None:
        """Copy gradients, and their norms if these are measured, to the unit's own memory, where they stay."""
        of_segment.wait()  # earlier gradients may be on their way to that memory
        memory = of_segment.memory_beside_masters.get(of_segment.layout, pin=True)
        self._download(of_segment, memory, self.measures_norms and of_segment.layout.norm_dtype is not None)

    def _add(self, of_segment: SegmentGradients) -> None:
        """Copy gradients to a landing buffer, and add them to earlier ones."""
        tensors_before = {gradient: gradient.tensor for gradient in of_segment.gathered}
        earlier_ticket = of_segment.ticket
        totals = of_segment.make_sums()  # this may wait for `earlier_ticket`
        buffer = self._land(of_segment)
        norm_dtype = of_segment.layout.norm_dtype if self.measures_norms else None
        sums: list[_Sum] = []
        for gradient, tensor_before in tensors_before.items():
            landed, total = gradient.tensor, totals[gradient]
            assert landed is not None
            norm = None if norm_dtype is None else torch.empty((), dtype=torch.float32, device="cpu")
            gradient.set_tensor(total, norm)
            sums.append(_Sum(total, tensor_before, landed, norm))
        moved_bytes = 2 * sum(weight_sum.total.nbytes for weight_sum in sums)
        after = [ticket for ticket in (earlier_ticket, of_segment.ticket) if ticket is not None]
        job = Job(partial(_add_up, sums, norm_dtype), after, moved_bytes, buffer.release)
        ticket = self._backend.trace.work(Kind.ADD, of_segment.unit.name, job)
        buffer.set_reader(ticket)
        of_segment.ticket = ticket

    def _stay(self, of_segment: SegmentGradients, more_comes: bool) -> None:
        """Keep gradients on the device until the unit is updated, and add them to earlier ones there.

        Measured norms are copied to the host. If the device runs out of memory for a sum, all gradients
        go to the host.
        """
        of_segment.release_memory()  # it is not needed any more; this also waits for earlier norms
        assert of_segment.stored is not Stored.ON_HOST, of_segment.unit.name
        gathered = of_segment.gathered
        with untracked():
            for gradient in list(gathered):
                try:
                    add_on_device(gradient, gathered[gradient], more_comes)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    break
                del gathered[gradient]
        if gathered:
            move_to_host(of_segment)
            self._add(of_segment)
        elif self.measures_norms:
            self._measure_on_device(of_segment)

    def _measure_on_device(self, of_segment: SegmentGradients) -> None:
        """Measure gradients that stay on the device, and copy their norms to the host.

        Gradients of an earlier backward pass are measured again, even if their weights were frozen since, because they
        share the memory for norms.
        """
        stored = of_segment.stored_tensors
        norm_dtype = norm_dtype_of([gradient.weight for gradient in stored])
        if norm_dtype is None:
            for gradient in stored:
                gradient.norm = None
            return
        nbytes = len(of_segment.gradients) * torch.float32.itemsize
        # Not a staging buffer: computing would wait for gradients of other units that are on their way.
        if of_segment.norms_on_device is None:
            of_segment.norms_on_device = GradientMemory(self._backend.allocate(nbytes))
        on_device = of_segment.norms_on_device
        measured = on_device.bytes.view(torch.float32)[: len(stored)]
        torch.stack(torch._foreach_norm(list(stored.values()), 2, norm_dtype), out=measured)
        memory = of_segment.segment.memory.get_companion("norms", nbytes, pin=True).bytes
        self.download_part(of_segment, memory[: measured.nbytes], on_device)
        for gradient, norm in zip(stored, memory.view(torch.float32), strict=False):
            gradient.norm = norm

    # ---------------------------------------------------------------------------------------------- parts of the ways

    def _land(self, of_segment: SegmentGradients) -> LandingBuffer:
        """Copy gradients to a landing buffer, and return the buffer to its reader."""
        buffer = self.landing.take(of_segment.layout.nbytes)
        self._download(of_segment, buffer)
        return buffer

    def _download(self, of_segment: SegmentGradients, memory: GradientMemory, has_norms: bool = False) -> None:
        """Copy gradients to this memory on the host, as they came, and with `has_norms` their norms behind them."""
        gathered, layout = of_segment.take_gathered(), of_segment.layout
        staging = self.staging.take(layout.nbytes)
        tensors, norms = staging.views(layout)
        places = dict(zip(of_segment.trained, tensors, strict=True))
        torch._foreach_copy_([places[gradient] for gradient in gathered], list(gathered.values()))
        nbytes = layout.norms_at
        if has_norms:  # norms of gradients that have not come are measured, too, and not used
            torch.stack(torch._foreach_norm(tensors, 2, layout.norm_dtype), out=norms)
            nbytes = layout.nbytes
        self.download_part(of_segment, memory.bytes[:nbytes], staging)
        landed, norms = memory.views(layout)
        for index, gradient in enumerate(of_segment.trained):
            if gradient in gathered:
                gradient.set_tensor(landed[index], norms[index] if has_norms else None)

    def download_part(
        self,
        of_segment: SegmentGradients,
        target: Tensor,
        staging: GradientMemory,
        begin: int = 0,
    ) -> Ticket:
        """Copy a part of a staging buffer, or of memory for norms, to the host."""
        source = staging.bytes[begin : begin + target.nbytes]
        ticket = self._backend.trace.download(Kind.GRADIENTS, of_segment.unit.name, target, source)
        staging.ticket = ticket
        of_segment.ticket = ticket
        self._stats.bytes_to_host += target.nbytes
        return ticket
