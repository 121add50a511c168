"""An activation: memory that autograd saved, where it is now, and the tensors that lie in it.

[Note: changes in place]
The copy on the host is what the memory held when its unit was left. Autograd would refuse a tensor that was changed
after it was saved, so versions are compared once more when the device memory is released; later changes cannot reach
the copy.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.pool import Loan
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.torch_private import weak_storage
from sp_lightning.pipeline.weights.buffers import ALIGNMENT

_WASTE = 2  # memory is not worth a copy if less than one part in so many of it was saved


class Stage(enum.Enum):
    """How far an activation is on its way to the host and back."""

    DEVICE = enum.auto()
    """On the device, where it was computed."""
    LEAVING = enum.auto()
    """On the device; the copy to the host was started."""
    HOST = enum.auto()
    """On the host only."""
    BACK = enum.auto()
    """On the host; the copy to the device was started, and `unpack` makes computing wait for its ticket."""


class Activation:
    """Memory that autograd saved: a storage, or the part of it from the first to the last byte that was saved.

    Attributes:
        unit: The name of the unit that saved it first.
        start: The byte of the storage at which it begins.
        end: The byte of the storage at which it ends.
        held: Bytes that stay on the device as long as any of it does: those of the whole storage.
        version: The version that the tensors in it had when they were saved.
        views: The saved tensors that lie in it.
        stage: How far it is on its way to the host and back.
        host: Its copy on the host.
        device: The memory that it was fetched into.
        ticket: The copy that nothing has waited for yet.
    """

    def __init__(self, tensor: Tensor, start: int, end: int, meter: Meter, leftovers: deque[Leftover]) -> None:
        self.unit = ""
        self.host: Loan | None = None
        self._meter = meter
        self._counted = meter.add(tensor)
        self.start, self.end = start, end
        self.held = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.views: list[View] = []
        self.stage = Stage.DEVICE
        self.device: Tensor | None = None
        self.ticket: Ticket | None = None
        self._storage = weak_storage(tensor)  # while this lives, no other storage gets the same identity
        self._leftovers = leftovers

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.end - self.start

    def is_worth_a_copy(self) -> bool:
        """Tell whether enough of it was saved: a column of a large matrix would take all of the matrix along."""
        saved = sum(min(view.tensor.nbytes, self.nbytes) for view in self.views if view.tensor is not None)
        return saved * _WASTE + ALIGNMENT >= self.nbytes

    def include(self, tensor: Tensor, start: int, end: int) -> bool:
        """Include a tensor of the same storage, growing if nothing was copied yet; return False if it does not fit."""
        if tensor._version != self.version:
            return False
        if self.stage is Stage.DEVICE:
            self.start, self.end = min(self.start, start), max(self.end, end)
        return self.start <= start and end <= self.end

    def add(self, tensor: Tensor) -> View:
        """Record a saved tensor that lies in it."""
        view = View(tensor)
        if self.stage not in (Stage.DEVICE, Stage.LEAVING):
            view.release()
        self.views.append(view)
        return view

    def source(self) -> Tensor:
        """Return its bytes where they were computed."""
        tensor = self.views[0].tensor
        assert tensor is not None
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), self.start, (self.nbytes,), (1,))

    def release(self) -> None:
        """Release the memory that it was computed in, now that the host has a copy."""
        for view in self.views:
            view.release()
        self._meter.remove(self._counted)
        self.stage, self.ticket, self._counted = Stage.HOST, None, 0

    def begin_fetch(self, device: Tensor, ticket: Ticket) -> None:
        """Note that it is being copied into memory of the device."""
        self.stage, self.device, self.ticket = Stage.BACK, device, ticket
        self._counted = self._meter.add(device)

    def release_fetched(self) -> None:
        """Release the memory that it was fetched into."""
        self._meter.remove(self._counted)
        self.stage, self.device, self.ticket, self._counted = Stage.HOST, None, None, 0

    def __del__(self) -> None:
        self._meter.remove(self._counted)
        if self.host is not None:  # autograd may free it in any thread: only leave a note
            device = None if self.ticket is None else self.device
            self._leftovers.append(Leftover(self.host, device, self.ticket))


class View:
    """A saved tensor: the tensor itself while its memory has not left, how it lies in its storage afterwards.

    Attributes:
        tensor: An alias of the tensor, without its graph; None once it was released.
        version: Its version when it was saved.
    """

    __slots__ = ("_changed", "_layout", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # the tensor itself may hold the node that saves it
        self.version = tensor._version
        self._changed = False
        self._layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]

    @property
    def changed_in_place(self) -> bool:
        """Whether it was written to after it was saved, and before it was released; see [Note: changes in place]."""
        return self._changed if self.tensor is None else self.tensor._version != self.version

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self._layout[2] if self.tensor is None else self.tensor.shape

    def release(self) -> None:
        """Release the tensor, and remember what is needed to make it again."""
        tensor = self.tensor
        if tensor is not None:
            self._changed = self.changed_in_place
            offset = int(tensor.storage_offset()) * tensor.element_size()
            self._layout = tensor.dtype, offset, tensor.size(), tensor.stride()
            self.tensor = None

    def rebuild_in(self, memory: Tensor, start: int) -> Tensor:
        """Make the tensor again, in memory that holds its storage from byte `start` on."""
        dtype, offset, size, stride = self._layout
        first = (offset - start) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), first, size, stride)


class Offloaded(NamedTuple):
    """The object that autograd holds in place of an offloaded tensor."""

    activation: Activation
    view: View


class Leftover(NamedTuple):
    """Memory that an activation no longer needs, and a copy into or out of it that nothing has waited for yet."""

    host: Loan
    device: Tensor | None
    ticket: Ticket | None


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes; the beginning is rounded down to be aligned."""
    elements = tensor.numel()
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    # torch chooses kernels by a tensor's alignment, and another kernel may round in another way
    return start // ALIGNMENT * ALIGNMENT, start + elements * tensor.element_size()
