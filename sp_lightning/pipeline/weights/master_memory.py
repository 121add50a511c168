"""The host memory that masters lie in, from one arrangement to the next.

A master whose memory others hold (`kept = p.data`, a `state_dict()`) stays where it is when other units travel
together: whoever holds it expects to see what becomes of the weight, and may write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.rooms import Room
from sp_lightning.pipeline.weights.weight import Weight

_Plan: TypeAlias = "tuple[tuple[tuple[int, int], ...], int]"  # masters, by identity, each with its offset; all bytes


class MasterMemory:
    """The host memory that masters lie in. It outlives an arrangement: masters that stay together do not move."""

    def __init__(self) -> None:
        self._buffers: dict[_Plan, HostBuffer] = {}
        self._homes: dict[int, HostBuffer] = {}  # the buffer that each master lies in, by its identity
        self._pieces: dict[int, HostBuffer] = {}  # its part of that

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @classmethod
    def of_one(cls, weight: Weight, piece: HostBuffer) -> MasterMemory:
        """Return memory in which one master lies, which is to stay there."""
        memory = cls()
        memory._buffers[_plan([weight], [0], piece.nbytes)] = piece
        return memory

    def find(self, weights: Sequence[Weight], offsets: Sequence[int], nbytes: int) -> HostBuffer | None:
        """Return the memory that the masters of just these weights lie in, if they lie together and like this."""
        return self._buffers.get(_plan(weights, offsets, nbytes))

    def tensor_of(self, weight: Weight) -> Tensor:
        """Return the memory that a master lies in; what the master has now, if that is not ours."""
        piece = self._pieces.get(id(weight.master))
        return weight.master.data if piece is None else piece.tensors[0]

    def held_by_others(self, weights: Iterable[Weight]) -> dict[Weight, HostBuffer]:
        """Return those of the weights whose masters have memory from us that others hold, and that memory."""
        pieces = {weight: self._pieces.get(id(weight.master)) for weight in weights}
        return {
            weight: piece
            for weight, piece in pieces.items()
            if piece is not None and weight.is_held_in(piece.tensors[0])
        }

    def keep(self, rooms: Iterable[Room], backend: Backend) -> None:
        """Keep the memory that the masters of a group lie in now, and release that which the last master has left."""
        for room in rooms:
            self._buffers[_plan(room.weights, room.offsets, room.memory.nbytes)] = room.memory
            for weight in room.weights:
                self._homes[id(weight.master)] = room.memory
                self._pieces[id(weight.master)] = room.piece_of(weight, backend)
        self._release_all_but(self._homes.values())

    def release_all_but(self, rooms: Sequence[Room]) -> None:
        """Release the memory in which no masters lie any more.

        Args:
            rooms: The rooms that are in use.
        """
        self._release_all_but([room.memory for room in rooms])
        in_use = {id(weight.master) for room in rooms for weight in room.weights}
        for master in self._homes.keys() - in_use:
            del self._homes[master], self._pieces[master]

    def leave(self, weight: Weight) -> None:
        """Forget the memory of a weight, and of the weights with it that nobody else holds: they get new memory."""
        self._pieces.pop(id(weight.master), None)
        home = self._homes.pop(id(weight.master), None)
        self._release_all_but([buffer for buffer in self._buffers.values() if buffer is not home])

    def _release_all_but(self, buffers: Iterable[HostBuffer]) -> None:
        in_use = set(map(id, buffers))
        for plan in [plan for plan, buffer in self._buffers.items() if id(buffer) not in in_use]:
            self._buffers.pop(plan).release()


def _plan(weights: Sequence[Weight], offsets: Sequence[int], nbytes: int) -> _Plan:
    return tuple((id(weight.master), offset) for weight, offset in zip(weights, offsets, strict=True)), nbytes
