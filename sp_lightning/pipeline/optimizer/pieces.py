"""The pieces in which a segment visits the device, and the layout of its state on the host for that.

A piece is the same slice of each field of the segment's weights: of masters, copies, gradients and all of their state.
Each field of neighboring weights lies together on the host, so a slice travels in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim.layout import BLOCK
from sp_lightning.optim.on_device import PIECE, Effort, part_of
from sp_lightning.optim.rules import Memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in
from sp_lightning.pipeline.weights.segment import Segment

PIECES_AT_ONCE = 2  # one is stepped while the next one arrives, or the last one leaves


def pack_state(unit: Unit, optimizer: Optimizer) -> bool:
    """Put the state of weights that are sent together in one block next to the masters, pinned as these are.

    State that is not there yet gets new memory, because existing memory may hold the state of another optimizer. If
    there is no memory, return False; the state stays where it is.
    """
    for segment in unit.segments:
        with without_torch_function():
            states = [optimizer.state.get(weight.master, {}) for weight in segment.weights]
        # A count of steps is read on the host, and a tensor without elements has no address.
        found = [
            (state, name, value)
            for name in dict.fromkeys(chain.from_iterable(states))
            for state in states
            if isinstance(value := state.get(name), Tensor) and name != "step" and value.numel()
        ]
        if not found:
            continue
        offsets, nbytes = lay_out([value.nbytes for *_, value in found])
        segment.memory.pin()
        before = segment.memory.companions.get("state")
        if before is not None and [value.data_ptr() - before.bytes.data_ptr() for *_, value in found] == offsets:
            continue
        segment.memory.release_companion("state")
        try:
            memory = segment.memory.get_companion("state", nbytes, pin=True).bytes
        except (MemoryError, OSError):  # Python's map raises the latter
            return False
        for (state, name, value), offset in zip(found, offsets, strict=True):
            state[name] = tensor_in(memory, offset, value, value.dtype).copy_(value)
    return True


class PieceBuffer:
    """Device memory for a piece."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.bytes = backend.allocate(nbytes)
        # done when its last piece has come down; at first, when the work that used the memory before is done
        self.ticket = backend.computed()


class Part(NamedTuple):
    """Some of the elements of a weight."""

    number: int  # the number of the weight in its segment
    begin: int
    memory: Memory


class Piece:
    """A part of a segment that visits the device in one go.

    Args:
        fields: For each name in `Memory`, the host memory in which the segment has it.
        parts: Parts of neighboring weights, in the order in which they lie there.
    """

    def __init__(self, fields: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
        self.host_parts = parts
        self._slices: dict[str, Tensor] = {}
        for name, memory in fields.items():
            tensors = [tensor for part in parts if (tensor := getattr(part.memory, name)) is not None]
            if tensors:
                begin = tensors[0].data_ptr() - memory.data_ptr()
                end = tensors[-1].data_ptr() + tensors[-1].nbytes - memory.data_ptr()
                self._slices[name] = memory[begin:end]
        first = parts[0].memory
        effort = Effort.of(first.low is not None, first.first_scale is not None)
        # bytes of the device's memory that its step reads and writes
        self.stepped_bytes = effort.nbytes * sum(part.memory.weight.numel() for part in parts)
        self._offsets, self.nbytes = lay_out([each.nbytes for each in self._slices.values()])

    def assign_buffer(self, buffer: PieceBuffer) -> None:
        """Have it visit in this buffer; `sent` has its new weights, and where they begin in the segment's place."""
        self.buffer = buffer
        self.up: list[tuple[Tensor, Tensor]] = []  # targets and sources
        self.down: list[tuple[Tensor, Tensor]] = []
        on_device: list[dict[str, Tensor]] = [{} for _ in self.host_parts]
        for (name, host), offset in zip(self._slices.items(), self._offsets, strict=True):
            device = buffer.bytes[offset : offset + host.nbytes]
            if name in ("weight", "copy"):  # the latter comes later, if there are copies
                self.sent = host.storage_offset(), device
            if name != "copy":
                self.up.append((device, host))
            if name != "gradient":
                self.down.append((host, device))
            for part, found in zip(self.host_parts, on_device, strict=True):
                tensor = getattr(part.memory, name)
                if tensor is not None:
                    begin = tensor.data_ptr() - host.data_ptr()
                    found[name] = device[begin : begin + tensor.nbytes].view(tensor.dtype)
        self.parts = [
            part._replace(memory=Memory(*map(found.get, Memory._fields)))
            for part, found in zip(self.host_parts, on_device, strict=True)
        ]


def pieces_of(segment: Segment, memories: Sequence[Memory], sums: Tensor | None) -> list[Piece]:
    """Divide a segment whose weights have this memory; `sums` has gradients, if they are on the host."""
    fields = dict.fromkeys(Memory._fields, segment.memory.companions["state"].bytes)
    fields.update(weight=segment.memory.bytes, copy=segment.source.bytes)
    if sums is not None:
        fields["gradient"] = sums
    # all elements in a line, on which each weight begins where a block does
    sizes = [memory.weight.numel() for memory in memories]
    *first, most = accumulate([-(-size // BLOCK) * BLOCK for size in sizes], initial=0)
    pieces: list[Piece] = []
    for start in range(0, most, PIECE):
        parts: list[Part] = []
        for number, memory in enumerate(memories):
            begin = max(0, start - first[number])
            end = min(sizes[number], start + PIECE - first[number])
            if begin < end:
                parts.append(Part(number, begin, part_of(memory, begin, end)))
        pieces.append(Piece(fields, parts))
    return pieces
