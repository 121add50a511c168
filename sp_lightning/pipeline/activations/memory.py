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

_WASTE = 4  # memory is not worth a copy if less than one part in so many of it was saved


class Stage(enum.Enum):
    """How far an activation is on its way to the host and back."""

    DEVICE = enum.auto()
    """On the device, where it was computed."""
    LEAVING = enum.auto()
    """On the device; the copy to the host was started."""
    HOST = enum.auto()
    """On the host only."""
    BACK = enum.auto()
    """The copy to the device was started, and `unpack` makes computing wait for its ticket."""


class Activation:
    """A storage that autograd saved tensors of.

    Attributes:
        unit: The name of the unit that saved it first.
        nbytes: Its size.
        version: The version that the tensors in it had when they were saved.
        views: The saved tensors that lie in it.
        stage: How far it is on its way to the host and back.
        host: Its copy on the host.
        device: The memory that it was fetched into.
        ticket: The copy that nothing has waited for yet.
    """

    def __init__(self, tensor: Tensor, unit: str, meter: Meter, leftovers: deque[Leftover]) -> None:
        self.unit = unit
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.views: list[View] = []
        self.stage = Stage.DEVICE
        self.host: Loan | None = None
        self.device: Tensor | None = None
        self.ticket: Ticket | None = None
        self._meter = meter
        self._counted = meter.add(tensor)
        self._storage = weak_storage(tensor)  # while this lives, no other storage gets the same identity
        self._leftovers = leftovers

    def is_worth_a_copy(self) -> bool:
        """Tell whether enough of it was saved: a column of a large matrix would take all of the matrix along."""
        return _WASTE * sum(view.tensor.nbytes for view in self.views if view.tensor is not None) >= self.nbytes

    def add(self, tensor: Tensor) -> View:
        """Record a saved tensor that lies in it."""
        view = View(tensor)
        if self.stage not in (Stage.DEVICE, Stage.LEAVING):
            view.release()
        self.views.append(view)
        return view

    @property
    def source(self) -> Tensor:
        """Its bytes where they were computed."""
        tensor = self.views[0].tensor
        assert tensor is not None
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

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

    def stay(self) -> None:
        """Forget a copy to the host that may have failed."""
        assert self.host is not None
        self._leftovers.append(Leftover(self.host, None, None))
        self.stage, self.host, self.ticket = Stage.DEVICE, None, None

    def __del__(self) -> None:
        self._meter.remove(self._counted)
        if self.host is not None:  # autograd may free it in any thread: only leave a note
            self._leftovers.append(Leftover(self.host, None if self.ticket is None else self.device, self.ticket))


class View:
    """A saved tensor: the tensor itself while its memory has not left, how it lies in its storage afterwards.

    Attributes:
        tensor: An alias of the tensor, without its graph; None once it was released.
        shape: Its shape.
    """

    __slots__ = ("_changed", "_layout", "_version", "shape", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # the tensor itself may hold the node that saves it
        self.shape = tensor.shape
        self._version = tensor._version
        self._changed = False
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    @property
    def changed_in_place(self) -> bool:
        """Whether it was written to after it was saved, and before it was released; see [Note: changes in place]."""
        return self._changed if self.tensor is None else self.tensor._version != self._version

    def release(self) -> None:
        """Release the tensor."""
        self._changed = self.changed_in_place
        self.tensor = None

    def rebuild_in(self, memory: Tensor) -> Tensor:
        """Make the tensor again, in memory that holds its storage."""
        dtype, offset, size, stride = self._layout
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)


class Offloaded(NamedTuple):
    """The object that autograd holds in place of an offloaded tensor."""

    activation: Activation
    view: View


class Leftover(NamedTuple):
    """Memory that an activation no longer needs, and a copy into or out of it that nothing has waited for yet."""

    host: Loan
    device: Tensor | None
    ticket: Ticket | None
