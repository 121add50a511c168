"""How a segment visits the device: where its state lies on the host, and in which pieces it goes up and down.

A piece is a range of elements of neighboring weights. For each field of `Memory`, what they have of it lies together on
the host, so it travels in one copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from sp_lightning.optim.layout import BLOCK, GROUP
from sp_lightning.optim.on_device import PIECE
from sp_lightning.optim.rules import Memory, Pass
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.buffers import as_bytes, lay_out, tensor_in
from sp_lightning.pipeline.weights.segment import Segment

PIECES_AT_ONCE = 2  # one is stepped while the next one arrives, or the last one leaves

_SCALES = ("first_scale", "second_scale")  # of which each serves a group of elements


# ----------------------------------------------------------------------------------------------- where state lies


def gather_state(segment: Segment, states: Sequence[dict[str, Any]]) -> None:
    """Have the state of a segment's weights lie together in page-locked memory."""
    names = list(dict.fromkeys(name for state in states for name in state))
    found: list[tuple[dict[str, Any], str, Tensor]] = []
    for name in names:
        for state in states:
            value = state.get(name)
            # a count of steps is read on the host
            if isinstance(value, Tensor) and name != "step":
                found.append((state, name, value))
    offsets, nbytes = lay_out([value.nbytes for _, _, value in found])
    segment.memory.pin()  # the masters' own, which travel, too
    memory = segment.memory.get_beside("state", nbytes, pin=True).bytes
    start = memory.data_ptr()
    for (state, name, value), offset in zip(found, offsets, strict=True):
        if value.data_ptr() != start + offset:
            state[name] = tensor_in(memory, offset, value, value.dtype).copy_(value)


class _Field(NamedTuple):
    """Something of each weight that travels, and the host memory in which it lies together."""

    name: str  # in `Memory`
    memory: Tensor
    goes_up: bool
    goes_down: bool


def fields_of(segment: Segment, state: Tensor, sums: Tensor | None) -> list[_Field]:
    """Return what of a segment travels, with sums of gradients if these lie on the host."""
    fields = [_Field("weight", segment.memory.bytes, True, True)]
    for name in ("low", "first", "second", *_SCALES):
        fields.append(_Field(name, state, True, True))
    if sums is not None:
        fields.append(_Field("gradient", sums, True, False))
    if segment.sends_copies:
        fields.append(_Field("copy", segment.source.bytes, False, True))
    return fields


# --------------------------------------------------------------------------------------------------------- pieces


class _Range(NamedTuple):
    """Some of the elements of a weight."""

    number: int  # of the weight in its segment
    begin: int
    end: int


class PieceBuffer:
    """Device memory for a piece."""

    def __init__(self, memory: Tensor, there: Ticket) -> None:
        self.bytes = memory
        self.ticket = there  # done when what was in it last has come down


@dataclass
class Piece:
    """A part of a segment that visits at once: what is copied, and the memory of its ranges on the device."""

    buffer: PieceBuffer
    up: list[tuple[Tensor, Tensor]]  # targets and sources
    down: list[tuple[Tensor, Tensor]]
    ranges: list[tuple[_Range, Memory]]
    placed: list[tuple[Tensor, Tensor]]  # where new weights go on the device, and where they are

    @cached_property
    def bytes_up(self) -> int:
        """What it sends to the device."""
        return sum(source.nbytes for _, source in self.up)

    @cached_property
    def bytes_down(self) -> int:
        """What comes back."""
        return sum(source.nbytes for _, source in self.down)


def _ranges(sizes: Sequence[int]) -> Iterator[list[_Range]]:
    """Divide weights with so many elements among pieces; only the end of a weight ends in the middle of a block."""
    piece: list[_Range] = []
    room = PIECE
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + max(BLOCK, room // BLOCK * BLOCK))
            piece.append(_Range(number, begin, end))
            room -= end - begin
            begin = end
            if room < BLOCK:
                yield piece
                piece = []
                room = PIECE
    if piece:
        yield piece


def _bytes_in(tensor: Tensor, field: _Field, part: _Range) -> tuple[int, int]:
    """Return where a range of a tensor begins and ends in the memory of its field."""
    start = tensor.data_ptr() - field.memory.data_ptr()
    begin, end = part.begin, part.end
    if field.name in _SCALES:
        begin, end = begin // GROUP, -(-end // GROUP)
    return start + begin * tensor.itemsize, start + end * tensor.itemsize


class Route:
    """How a segment visits, as long as everything lies where it does."""

    def __init__(self, segment: Segment, memories: Sequence[Memory], fields: Sequence[_Field]) -> None:
        self.segment = segment
        self._memories = memories
        self._fields = fields
        # what it is made for
        self.tensors = [tensor for memory in memories for tensor in memory]
        self.divided = list(_ranges([memory.weight.numel() for memory in memories]))
        self.nbytes = max(self._lay_out(ranges)[1] for ranges in self.divided)
        self.pieces: list[Piece] = []

    def _spans(self, ranges: Sequence[_Range]) -> list[tuple[_Field, list[tuple[_Range, Tensor, int, int]]]]:
        """Return for each field the ranges that have it, with their tensors, and where these lie in its memory."""
        spans = []
        for field in self._fields:
            lying = []
            for part in ranges:
                tensor = getattr(self._memories[part.number], field.name)
                if tensor is not None:
                    lying.append((part, tensor, *_bytes_in(tensor, field, part)))
            if lying:
                spans.append((field, lying))
        return spans

    def _lay_out(self, ranges: Sequence[_Range]) -> tuple[list[int], int]:
        return lay_out([lying[-1][3] - lying[0][2] for _, lying in self._spans(ranges)])

    def lie_in(self, buffers: Iterator[PieceBuffer]) -> None:
        """Make the pieces, one in each of these buffers."""
        self.pieces = [self._piece(ranges, next(buffers)) for ranges in self.divided]

    def _piece(self, ranges: Sequence[_Range], buffer: PieceBuffer) -> Piece:
        piece = Piece(buffer, [], [], [], [])
        offsets, _ = self._lay_out(ranges)
        on_device: dict[_Range, dict[str, Tensor]] = {part: {} for part in ranges}
        for (field, lying), offset in zip(self._spans(ranges), offsets, strict=True):
            begin, end = lying[0][2], lying[-1][3]
            host = field.memory[begin:end]
            device = buffer.bytes[offset : offset + end - begin]
            if field.goes_up:
                piece.up.append((device, host))
            if field.goes_down:
                piece.down.append((host, device))
            for part, tensor, first, last in lying:
                on_device[part][field.name] = device[first - begin : last - begin].view(tensor.dtype)
        for part, tensors in on_device.items():
            names = Memory._fields
            memory = Memory(**{name: tensors.get(name) for name in names})
            piece.ranges.append((part, memory))
            placed = memory.weight if memory.copy is None else memory.copy
            start = self.segment.offsets[part.number] + part.begin * placed.itemsize
            place = self.segment.place[start : start + placed.nbytes]
            piece.placed.append((place, as_bytes(placed)))
        return piece


def are_same(objects: Sequence[object], others: Sequence[object] | None) -> bool:
    """Tell whether two lists have the same objects; there may be no second one."""
    return others is not None and len(objects) == len(others) and all(map(is_, objects, others))


class Pieces:
    """The routes of all segments that visit, and the device memory that they pass through."""

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.backend = backend
        self.stats = stats
        self.asking = threading.Lock()  # one visit after the other takes pieces: two threads ask for visits
        self._routes: dict[Segment, Route] = {}
        self._buffers: list[PieceBuffer] = []

    def of(self, segment: Segment, sums: Tensor | None, passes: Sequence[Pass]) -> list[Piece]:
        """Return the pieces in which a segment visits; `sums` is host memory that its gradients lie in, if they do."""
        memories = [step.memory for step in passes]
        route = self._routes.get(segment)
        if route is None or not are_same([tensor for memory in memories for tensor in memory], route.tensors):
            state = segment.memory.beside["state"].bytes
            route = Route(segment, memories, fields_of(segment, state, sums))
            self._routes[segment] = route
        if not self._buffers or self._buffers[0].bytes.nbytes < route.nbytes:
            self.close()
            allocated = [self.backend.allocate(route.nbytes) for _ in range(PIECES_AT_ONCE)]
            there = self.backend.computed()  # what has used the memory before comes first
            self._buffers = [PieceBuffer(memory, there) for memory in allocated]
        if not route.pieces:
            route.lie_in(self._take_turns())
        return route.pieces

    def _take_turns(self) -> Iterator[PieceBuffer]:
        while True:
            buffer = self._buffers.pop(0)
            self._buffers.append(buffer)
            yield buffer

    def nbytes(self) -> int:
        """Return the bytes of device memory for pieces."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the memory for pieces, when nothing is in it any more."""
        for buffer in self._buffers:
            buffer.ticket.join()
        self._buffers.clear()
        for route in self._routes.values():
            route.pieces = []
