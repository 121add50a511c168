"""Memory through which gradients come home: pieces on the device, homes and a ring of slots on the host.

A *home* is where the gradients of a unit stay: one buffer, a tensor per weight. A *slot* of the ring is where they
only pass through, on their way into a sum or into the optimizer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline._private import users_of_storage, users_of_tensor
from sp_lightning.pipeline.host import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.transfer import Backend, Ticket
from sp_lightning.pipeline.weights import Weight

PIECES = 2  # of device memory: one is being filled while the other leaves
_CHUNK = 1 << 18  # elements cast and added at once: they stay in the cache in between


def lay_out_gradients(weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int, int]:
    """Where gradients lie in memory that they travel through or stay in.

    Returns:
        The gradients' offsets, the bytes in all, and where their norms lie, which travel with them.
    """
    sizes = [weight.master.numel() * dtype.itemsize for weight, dtype in zip(weights, dtypes, strict=True)]
    offsets, nbytes = lay_out([*sizes, len(sizes) * torch.float32.itemsize])
    return offsets[:-1], nbytes, offsets[-1]


def norms_in(memory: Tensor, offset: int, count: int) -> Tensor:
    """The norms of gradients, as they lie behind them."""
    like = torch.empty(count, device="meta")
    return tensor_in(memory, offset, like, torch.float32)


class TensorsIn:
    """Memory that is looked at as one tensor per gradient; the tensors are made once for each set of gradients."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._tensors: dict[tuple[object, ...], tuple[list[Tensor], Tensor]] = {}

    def tensors(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> tuple[list[Tensor], Tensor]:
        """Its bytes as gradients of these weights, and as their norms."""
        key = (*weights, *dtypes)
        if key not in self._tensors:
            offsets, _, norms_at = lay_out_gradients(weights, dtypes)
            tensors = [
                tensor_in(self.memory, offset, weight.host, dtype)
                for weight, dtype, offset in zip(weights, dtypes, offsets, strict=True)
            ]
            self._tensors[key] = tensors, norms_in(self.memory, norms_at, len(weights))
        return self._tensors[key]


class Piece(TensorsIn):
    """Device memory in which the gradients of one unit are put together.

    Attributes:
        ticket: The last copy out of it.
    """

    def __init__(self, nbytes: int, backend: Backend) -> None:
        super().__init__(backend.allocate(nbytes))
        self.ticket: Ticket | None = None


class Slot(TensorsIn):
    """Host memory through which the gradients of one unit pass.

    Attributes:
        is_free: Whether nothing is on its way into it or waits in it.
    """

    def __init__(self, nbytes: int, backend: Backend, pin: bool, released: threading.Condition) -> None:
        self.buffer = HostBuffer(nbytes, backend, pin)
        super().__init__(self.buffer.bytes)
        self.is_free = True
        self._released = released

    def take(self) -> None:
        """Nothing else may come through it until it is released."""
        self.is_free = False

    def release(self) -> None:
        """What came through it has been read."""
        with self._released:
            self.is_free = True
            self._released.notify_all()


class Ring:
    """Slots that take turns; new ones are made only as far as they are needed.

    Args:
        backend: Pins the memory.
        pin: Whether to page-lock it.
        most: How many slots there may be.
    """

    def __init__(self, backend: Backend, pin: bool, most: int) -> None:
        self._backend = backend
        self._pin = pin
        self._most = most
        self._slots: list[Slot] = []
        self._released = threading.Condition()

    def take(self, nbytes: int) -> Slot:
        """A slot of at least so many bytes; waits for one if all are in use."""
        with self._released:
            slot = self._free()
            if slot is None and len(self._slots) < self._most:
                slot = self._make(nbytes)
            while slot is None:
                self._released.wait()
                slot = self._free()
            if slot.memory.nbytes < nbytes:
                self._slots.remove(slot)
                slot.buffer.release()
                slot = self._make(nbytes)
            slot.take()
            return slot

    def _free(self) -> Slot | None:
        return next((slot for slot in self._slots if slot.is_free), None)

    def _make(self, nbytes: int) -> Slot:
        self._slots.append(Slot(nbytes, self._backend, self._pin, self._released))
        return self._slots[-1]

    def release_all(self) -> None:
        """After an exception: nothing is on its way any more."""
        for slot in self._slots:
            slot.release()

    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def close(self) -> None:
        """Undo page-locks."""
        for slot in self._slots:
            slot.buffer.release()


class Home:
    """Where the gradients of a unit's weights stay on the host: one buffer, a tensor per weight.

    It is used again every step, unless the user kept a gradient (PCGrad and the like do): then that one stays theirs.
    """

    def __init__(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype], backend: Backend, pin: bool) -> None:
        self.weights = list(weights)
        self.dtypes = list(dtypes)
        self._backend = backend
        self._pin = pin
        self._build()

    def _build(self) -> None:
        nbytes = lay_out_gradients(self.weights, self.dtypes)[1]
        self.buffer = HostBuffer(nbytes, self._backend, self._pin)
        self.memory = self.buffer.bytes
        self.tensors, self.norms = TensorsIn(self.memory).tensors(self.weights, self.dtypes)

    def vacate(self) -> None:
        """Make sure that nobody else holds any of it."""
        if not all(_are_free(self.tensors)):
            self.buffer.release()
            self._build()

    def room_for(self, weight: Weight) -> Tensor:
        """Memory for one weight's gradient that nobody else holds."""
        index = self.weights.index(weight)
        return self.tensors[index] if _are_free(self.tensors)[index] else torch.empty_like(weight.host)


def _references(tensors: Sequence[Tensor]) -> list[int]:
    """How often Python holds each of them; counted here, as what a call adds depends on whether dynamo is at work."""
    return [sys.getrefcount(tensor) for tensor in tensors]


# what counts for a tensor that is in a list and nowhere else
(_OWN_REFERENCES,) = _references([torch.empty(0)])


def _are_free(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether only its home holds each gradient: not the user, not a view of it, not a `.grad`."""
    references = _references(tensors)
    return [
        count <= _OWN_REFERENCES and users_of_tensor(tensor) <= 1 and users_of_storage(tensor) <= 1
        for tensor, count in zip(tensors, references, strict=True)
    ]


def _references_of_a_shown_gradient() -> int:
    parameter, home = torch.nn.Parameter(torch.empty(0)), [torch.empty(0)]
    parameter.grad = home[0]
    gradient = parameter.grad  # noqa: F841 - a name for it counts, as in `is_only_shown`
    return _references(home)[0]


# the same where it is some Parameter's `.grad` and has one name, too: what the former counts depends on torch's version
_SHOWN_REFERENCES = _references_of_a_shown_gradient()


def is_only_shown(home: Sequence[Tensor], gradient: int) -> bool:
    """Whether only its home and `.grad` hold a gradient, so that nobody can tell when exactly it changes.

    Args:
        home: Gradients in the home.
        gradient: The `id` of one of them, for which the caller has one name.
    """
    for tensor, count in zip(home, _references(home), strict=True):
        if id(tensor) == gradient:
            return count <= _SHOWN_REFERENCES and users_of_tensor(tensor) <= 2 and users_of_storage(tensor) <= 1
    return False


def cast_and_add(total: Tensor, arrived: Tensor) -> None:
    """Add a gradient to a sum, in pieces that stay in the cache between the cast and the addition."""
    if total.dtype == arrived.dtype or total.stride() != arrived.stride():
        total.add_(arrived)
        return
    count = arrived.numel()
    flat_total = total.as_strided((count,), (1,))
    flat_arrived = arrived.as_strided((count,), (1,))
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        flat_total[start:end].add_(flat_arrived[start:end].to(total.dtype))
