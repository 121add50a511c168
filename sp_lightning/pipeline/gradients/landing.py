"""Memory through which gradients come to the host: pieces on the device, and a ring of slots on the host.

The gradients of a unit are put together in a *piece*, and leave it with one copy. Those that do not stay as they came
(homes.py) land in a *slot* of the ring, on their way into a sum or into the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights.host import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.sections import Section, divide
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

PIECES = 2  # one is filled while the other leaves
_LEFT_FREE = 0.1  # of the host's memory, when there are more slots than a few


class GradientLayout(NamedTuple):
    """Layout of gradients in memory that they travel through or stay in.

    Attributes:
        offsets: Offset of each gradient, in bytes.
        norms_at: Offset of their norms, which travel with them.
        nbytes: Bytes in all.
    """

    offsets: list[int]
    norms_at: int
    nbytes: int


def lay_out_gradients(weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> GradientLayout:
    """Lay out gradients of these weights in these dtypes."""
    sizes = [weight.master.numel() * dtype.itemsize for weight, dtype in zip(weights, dtypes, strict=True)]
    (*offsets, norms_at), nbytes = lay_out([*sizes, len(sizes) * torch.float32.itemsize])
    return GradientLayout(offsets, norms_at, nbytes)


def gradient_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's gradients, as they are sent to the host, with their norms."""
    weights = [weight for weight in unit.weights if weight.master.requires_grad]
    return lay_out_gradients(weights, [weight.gradient_dtype for weight in weights]).nbytes


def unit_of(weights: Sequence[Weight]) -> Unit | None:
    """Return the unit that has all of these weights, in this order; None if there is none."""
    unit, given = weights[0].unit, set(weights)
    return unit if [weight for weight in unit.weights if weight in given] == list(weights) else None


def norms_in(memory: Tensor, offset: int, count: int) -> Tensor:
    """Return the norms that lie in `memory` behind `count` gradients."""
    like = torch.empty(count, device="meta")
    return tensor_in(memory, offset, like, torch.float32)


class TensorsIn:
    """Memory viewed as one tensor per gradient; the tensors are made once for each set of gradients."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._made: dict[tuple[object, ...], tuple[list[Tensor], Tensor]] = {}

    def tensors(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return its bytes as gradients of these weights."""
        return self._tensors_and_norms(weights, dtypes)[0]

    def norms(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> Tensor:
        """Return its bytes as the norms of these gradients."""
        return self._tensors_and_norms(weights, dtypes)[1]

    def _tensors_and_norms(
        self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[Tensor], Tensor]:
        key = (*weights, *dtypes)
        if key not in self._made:
            layout = lay_out_gradients(weights, dtypes)
            tensors = [
                tensor_in(self.memory, offset, weight.host, dtype)
                for weight, dtype, offset in zip(weights, dtypes, layout.offsets, strict=True)
            ]
            self._made[key] = tensors, norms_in(self.memory, layout.norms_at, len(weights))
        return self._made[key]

    def flat(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return the gradients, and the padding between them, as one flat tensor for each stretch of one dtype."""
        layout = lay_out_gradients(weights, dtypes)
        pairs = zip(dtypes, layout.offsets, strict=True)
        starts = [next(run)[1] for _, run in groupby(pairs, key=lambda pair: pair[0])]
        runs = zip((dtype for dtype, _ in groupby(dtypes)), starts, [*starts[1:], layout.norms_at], strict=True)
        return [self.memory[start:end].view(dtype) for dtype, start, end in runs if start < end]


class GradientPiece(TensorsIn):
    """Device memory in which the gradients of one unit are put together.

    Attributes:
        ticket: The last copy out of it; None if there was none.
    """

    def __init__(self, nbytes: int, backend: Backend) -> None:
        super().__init__(backend.allocate(nbytes))
        self.ticket: Ticket | None = None


@dataclass(eq=False)
class Parcel:
    """The gradients of a unit, put together in a piece, before their route is chosen.

    Attributes:
        unit: The unit.
        weights: Those of its weights that the gradients belong to.
        piece: The memory that they lie in.
        tensors: The gradients, one for each weight.
        has_norms: Whether their norms lie behind them.
    """

    unit: Unit
    weights: list[Weight]
    piece: GradientPiece
    tensors: list[Tensor]
    has_norms: bool = False

    def measure(self) -> None:
        """Compute the norms of the gradients, which then travel with them."""
        norms = self.piece.norms(self.weights, self.dtypes)
        torch.stack(torch._foreach_norm(self.tensors, 2, torch.float32), out=norms)
        self.has_norms = True

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype in which each gradient was computed, or averaged."""
        return [tensor.dtype for tensor in self.tensors]

    @property
    def is_lower(self) -> bool:
        """Whether one of them is in another dtype than its master."""
        return any(tensor.dtype != w.master.dtype for w, tensor in zip(self.weights, self.tensors, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that the gradients take on the host, with room for their norms."""
        return self._layout.nbytes

    @property
    def bytes_to_send(self) -> int:
        """Bytes to copy: the norms are among them only if they were computed."""
        return self._layout.nbytes if self.has_norms else self._layout.norms_at

    @property
    def sections(self) -> list[Section]:
        """The sections of the bytes to copy."""
        return divide([weight.master for weight in self.weights], self._layout.offsets, self.dtypes, self.bytes_to_send)

    @cached_property
    def _layout(self) -> GradientLayout:
        return lay_out_gradients(self.weights, self.dtypes)


class Pieces:
    """Pieces that take turns, each large enough for any unit's gradients.

    Args:
        units: The units.
        backend: Allocates the memory.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend) -> None:
        self._units = units
        self._backend = backend
        self._pieces: list[GradientPiece] = []
        self._turn = 0
        self._bytes_given_up = 0

    def reserve(self) -> None:
        """Allocate the pieces before a step: during it they would split memory that activations need in one piece."""
        if not self._pieces and (nbytes := max(map(gradient_bytes, self._units), default=0)):
            self._backend.gather_free_memory()
            self._pieces = [self.make(nbytes) for _ in range(PIECES)]

    def take(self, nbytes: int) -> GradientPiece:
        """Return the next piece, of at least `nbytes`; computing waits until the last copy out of it is done."""
        if len(self._pieces) < PIECES:
            self._turn = len(self._pieces)
            self._pieces.append(self.make(max(nbytes, *map(gradient_bytes, self._units))))
            return self._pieces[-1]
        self._turn = (self._turn + 1) % PIECES
        ticket = self._pieces[self._turn].ticket
        if ticket is not None:
            self._backend.trace.wait(ticket, "gradients")
        if self._pieces[self._turn].memory.nbytes < nbytes:  # some weights were frozen, or lowered, when it was made
            self._pieces[self._turn] = self.make(nbytes)
        return self._pieces[self._turn]

    def make(self, nbytes: int) -> GradientPiece:
        """Make a piece of `nbytes` that does not take turns."""
        return GradientPiece(nbytes, self._backend)

    def discard(self, piece: GradientPiece) -> None:
        """Never use this piece again."""
        self._pieces = [other for other in self._pieces if other is not piece]

    def forget_copies(self) -> None:
        """Forget the copies out of the pieces, after an exception."""
        for piece in self._pieces:
            piece.ticket = None

    def nbytes(self) -> int:
        """Return the bytes of device memory, those that were given up included."""
        return self._bytes_given_up + sum(piece.memory.nbytes for piece in self._pieces)

    def give_up_memory(self) -> None:
        """Free the memory, when no copy is under way."""
        self._bytes_given_up = self.nbytes()
        self._pieces.clear()


class Slot(TensorsIn):
    """Host memory through which the gradients of one unit pass.

    Attributes:
        is_free: Whether nothing is on its way into it, or waits in it to be read.
    """

    def __init__(self, buffer: HostBuffer, released: threading.Condition) -> None:
        self.buffer = buffer
        super().__init__(buffer.bytes)
        self.is_free = True
        self._released = released

    def take(self) -> None:
        """Reserve the slot until it is released."""
        self.is_free = False

    def release(self) -> None:
        """Free the slot, as its gradients have been read."""
        with self._released:
            self.is_free = True
            self._released.notify_all()


class Ring:
    """Slots that are used again and again; a new one is made only if no other is free.

    Args:
        backend: Pins the memory.
        pin: Whether to pin it.
        few: Number of slots that it may always have.
    """

    def __init__(self, backend: Backend, pin: bool, few: int) -> None:
        self._backend = backend
        self._pin = pin
        self._few = few
        self._slots: list[Slot] = []
        self._released = threading.Condition()

    def take(self, nbytes: int, patient: bool = False) -> Slot:
        """Take a slot; block until one is released if all are in use and there may not be more.

        Args:
            nbytes: The least bytes that it must have.
            patient: Whether to rather wait than have more than a few, where the host has memory to spare.
        """
        with self._released:
            while (slot := self._find(nbytes, patient)) is None:
                self._released.wait()
            slot.take()
            return slot

    def take_over(self, buffer: HostBuffer) -> None:
        """Make a slot of memory that was used otherwise if all others are in use; release it if not."""
        with self._released:
            if not self._free() and self._may_grow(0, patient=False):
                self._add(buffer)
            else:
                buffer.release()

    def _find(self, nbytes: int, patient: bool) -> Slot | None:
        """Find the smallest free slot that is large enough, or make one; None if there may not be more."""
        free = self._free()
        large_enough = next((slot for slot in free if slot.memory.nbytes >= nbytes), None)
        if large_enough is not None:
            return large_enough
        if free:
            self._slots.remove(free[-1])
            free[-1].buffer.release()
        elif not self._may_grow(nbytes, patient):
            return None
        return self._add(HostBuffer(nbytes, self._backend, self._pin))

    def _free(self) -> list[Slot]:
        """Return the slots that are free, the smallest first."""
        return sorted((slot for slot in self._slots if slot.is_free), key=lambda slot: slot.memory.nbytes)

    def _may_grow(self, nbytes: int, patient: bool) -> bool:
        return len(self._slots) < self._few or (not patient and _is_left_over(nbytes))

    def _add(self, buffer: HostBuffer) -> Slot:
        self._slots.append(Slot(buffer, self._released))
        return self._slots[-1]

    def release_all(self) -> None:
        """Release all slots, after an exception."""
        for slot in self._slots:
            slot.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def close(self) -> None:
        """Unpin the memory."""
        for slot in self._slots:
            slot.buffer.release()


def _is_left_over(nbytes: int) -> bool:
    """Tell whether the host has so much memory to spare."""
    free, total = available_host_memory(), total_host_memory()
    return free is not None and total is not None and free - nbytes >= _LEFT_FREE * total


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host.

    Attributes:
        unit: The unit.
        weights: Those of its weights that the gradients belong to.
        arrived: The tensors that the gradients land in, one for each weight.
        ticket: The copy, or the addition, that brings them.
        slot: The slot to release when they have been read; None if they land where they stay.
    """

    unit: Unit
    weights: list[Weight]
    arrived: list[Tensor]
    ticket: Ticket
    slot: Slot | None
