"""The host memory that masters lie in, from one arrangement to the next.

A master whose memory others hold (`kept = p.data`, a `state_dict()`) stays where it is when other units travel
together: whoever holds it expects to see what becomes of the weight, and may write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

from torch import Tensor

from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.host import GroupHost
from sp_lightning.pipeline.weights.weight import Weight

_Masters: TypeAlias = "tuple[int, ...]"  # their identities, in the order in which they lie in memory


class MasterMemory:
    """The host memory that masters lie in. It outlives an arrangement: masters that stay together do not move."""

    def __init__(self) -> None:
        self._buffers: dict[_Masters, HostBuffer] = {}
        self._pieces: dict[int, HostBuffer] = {}  # what each master lies in, by its identity
        self._neighbors: dict[int, _Masters] = {}  # the masters that it lies with, itself included

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def find(self, weights: Sequence[Weight]) -> HostBuffer | None:
        """Return the memory that the masters of just these weights lie in, if they lie together."""
        return self._buffers.get(_key(weights))

    def tensor_of(self, weight: Weight) -> Tensor:
        """Return the memory that a master lies in; what the master has now, if that is not ours."""
        piece = self._pieces.get(id(weight.master))
        return weight.master.data if piece is None else piece.tensors[0]

    def find_pieces(self, weights: Sequence[Weight]) -> list[HostBuffer | None]:
        """Return a piece of memory for each master, if they do not lie together but others hold one of them.

        Returns:
            For each weight the memory that its master must stay in, or None; an empty list if all of them may move.
        """
        if self.find(weights) is not None:
            return []
        pieces = [self._pieces[id(weight.master)] if self._is_held(weight) else None for weight in weights]
        return pieces if any(pieces) else []

    def _is_held(self, weight: Weight) -> bool:
        """Tell whether others hold the memory that a master has from us."""
        piece = self._pieces.get(id(weight.master))
        return piece is not None and weight.is_held_in(piece.tensors[0])

    def keep(self, host: GroupHost) -> None:
        """Keep the memory that the masters of a group lie in now, and release that which the last master has left."""
        together = _key(host.weights)
        if host.masters is not None:
            self._buffers[together] = host.masters
        self._pieces.update((id(weight.master), host.piece_of(weight)) for weight in host.weights)
        before = {self._neighbors[master] for master in together if master in self._neighbors}
        self._neighbors.update(dict.fromkeys(together, together))
        for left in before - {together}:
            if all(self._neighbors.get(master) != left for master in left):
                self._release(left)

    def release_all_but(self, groups: Iterable[Sequence[Weight]]) -> None:
        """Release the memory in which no masters lie any more.

        Args:
            groups: For each memory that is in use, the weights in it.
        """
        in_use = set(map(_key, groups))
        for key in self._buffers.keys() - in_use:
            self._release(key)
        for master in self._pieces.keys() - set(chain.from_iterable(in_use)):
            del self._pieces[master], self._neighbors[master]

    def leave(self, weight: Weight) -> None:
        """Forget the memory of a weight, and of the weights with it that nobody else holds: they get new memory."""
        self._pieces.pop(id(weight.master), None)
        self._neighbors.pop(id(weight.master), None)
        for key in [key for key in self._buffers if id(weight.master) in key]:
            self._release(key)

    def _release(self, masters: _Masters) -> None:
        if masters in self._buffers:
            self._buffers.pop(masters).release()


def _key(weights: Sequence[Weight]) -> _Masters:
    return tuple(id(weight.master) for weight in weights)
