"""An activation: memory that autograd saved, where it is now, and the tensors that lie in it.

[Note: changes in place]
The copy on the host is what the memory held when its unit left. Autograd would refuse a tensor that was changed after
it was saved, so versions are looked at again when the device's memory is let go; later changes cannot reach the copy.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline._private import weak_storage
from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.pool import Piece
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights.host import ALIGNMENT

_WASTE = 2  # memory of which less than one part in so many was saved is not worth a copy


class Stage(enum.Enum):
    """Where an activation is."""

    DEVICE = enum.auto()
    """Where it was computed; it has not left."""
    LEAVING = enum.auto()
    """There, and the copy to the host was started."""
    HOST = enum.auto()
    """On the host alone."""
    BACK = enum.auto()
    """On the host, and the copy to the device was started; computing waits for its ticket in `unpack`."""


class Activation:
    """Memory that autograd saved: a storage, or the part of it from the first to the last byte that was saved.

    Attributes:
        unit: Name of the unit that saved it first.
        start: Where in the storage it begins, in bytes.
        end: Where it ends.
        held: Bytes that stay on the device as long as any of it does: those of the whole storage.
        version: The version of what was saved of it.
        views: The tensors that were saved of it.
        stage: Where it is.
        host: Its copy.
        device: The memory that it was brought back to.
        ticket: The copy that nothing has waited for yet.
    """

    def __init__(self, tensor: Tensor, start: int, end: int, meter: Meter, returned: deque[Returned]) -> None:
        self.unit = ""
        self.host: Piece | None = None
        self._meter = meter
        self._counted = meter.add(tensor)
        self.start, self.end = start, end
        self.held = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.views: list[View] = []
        self.stage = Stage.DEVICE
        self.device: Tensor | None = None
        self.ticket: Ticket | None = None
        self._storage = weak_storage(tensor)  # as long as it lives, no other storage has the same identity
        self._returned = returned

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.end - self.start

    def is_worth_a_copy(self) -> bool:
        """Whether enough of it was saved: a column of a large matrix would take all of the matrix along."""
        saved = sum(min(view.tensor.nbytes, self.nbytes) for view in self.views if view.tensor is not None)
        return saved * _WASTE + ALIGNMENT >= self.nbytes

    def can_hold(self, tensor: Tensor, start: int, end: int) -> bool:
        """Whether a tensor that lies here in the same storage is part of it; not copied yet, it may grow."""
        if tensor._version != self.version:
            return False
        if self.stage is Stage.DEVICE:
            self.start, self.end = min(self.start, start), max(self.end, end)
        return self.start <= start and end <= self.end

    def add(self, tensor: Tensor) -> View:
        """A tensor of it was saved."""
        view = View(tensor)
        if self.stage not in (Stage.DEVICE, Stage.LEAVING):
            view.let_go()
        self.views.append(view)
        return view

    def source(self) -> Tensor:
        """Its bytes where it was computed."""
        tensor = self.views[0].tensor
        assert tensor is not None
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), self.start, (self.nbytes,), (1,))

    def let_go(self) -> None:
        """The host has it: give up the memory where it was computed."""
        for view in self.views:
            view.let_go()
        self._meter.remove(self._counted)
        self.stage, self.ticket, self._counted = Stage.HOST, None, 0

    def come_back(self, device: Tensor, ticket: Ticket) -> None:
        """It is being copied into memory of the device."""
        self.stage, self.device, self.ticket = Stage.BACK, device, ticket
        self._counted = self._meter.add(device)

    def go_again(self) -> None:
        """Give up the memory that it was brought back to."""
        self._meter.remove(self._counted)
        self.stage, self.device, self.ticket, self._counted = Stage.HOST, None, None, 0

    def __del__(self) -> None:
        self._meter.remove(self._counted)
        if self.host is not None:  # in whichever thread autograd frees it: only leave word
            device = None if self.ticket is None else self.device
            self._returned.append(Returned(self.host, device, self.ticket))


class View:
    """A saved tensor: the tensor itself while it has not left, how it lies in its storage afterwards.

    Attributes:
        tensor: An alias of the tensor, without its graph; None once it has been let go.
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
        """Whether it was written to after it was saved, as far as backward would see it."""
        return self._changed if self.tensor is None else self.tensor._version != self.version

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self._layout[2] if self.tensor is None else self.tensor.shape

    def let_go(self) -> None:
        """Remember what is needed to make it again."""
        tensor = self.tensor
        if tensor is not None:
            self._changed = self.changed_in_place
            offset = int(tensor.storage_offset()) * tensor.element_size()
            self._layout = tensor.dtype, offset, tensor.size(), tensor.stride()
            self.tensor = None

    def made_of(self, memory: Tensor, start: int) -> Tensor:
        """The tensor again, in memory that holds its storage from byte `start` on."""
        dtype, offset, size, stride = self._layout
        first = (offset - start) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), first, size, stride)


class Offloaded(NamedTuple):
    """What autograd holds in place of a tensor."""

    activation: Activation
    view: View


class Returned(NamedTuple):
    """What is left of an activation that autograd dropped: memory, and the copy that nothing has waited for yet."""

    host: Piece
    device: Tensor | None
    ticket: Ticket | None


def extent(tensor: Tensor) -> tuple[int, int]:
    """From where to where in its storage a tensor lies, in bytes, at addresses as good as the tensor's own."""
    elements = tensor.numel()
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    # kernels choose by a tensor's alignment, and another kernel may round in another way
    return start // ALIGNMENT * ALIGNMENT, start + elements * tensor.element_size()
