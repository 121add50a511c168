"""Gradients that wait on the device until their unit is updated, where host memory has no room for them.

Clipping by norm keeps all gradients of a step, accumulation keeps their sums. Where host memory cannot hold these, they
stay on the device, are added up there, and go to the host when the optimizer updates their unit:

    backward    leaf.grad -> added to what waits                   device
    step()      what waits -> landing buffer -> the optimizer      host, in a lane beside computing

Before there is a plan, backward decides: by then it is known how much of the device a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_memory import LandingBuffers
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK
from sp_lightning.pipeline.lanes.lanes import DeferredTicket, Job, Kind
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.pipeline.torch_private import alias_count
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.segment import GradientLayout, HostMemory


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
        return self.is_limited if self.planned is None else bool(self.planned)

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
        elif of_segment.beside.memory is not None:  # the gradients have their memory on the host
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
