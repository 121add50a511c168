"""Flat tensors over tensors that lie side by side, so that one kernel call steps many weights.

Masters, gradients and lowered copies of a unit lie in buffers, each tensor in a storage of its own. Two of them are
neighbors if the second begins at the address where the first ends. So a flat tensor over neighbors never covers
memory that is not theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.weights.buffers import tensor_in

VECTOR_MULTIPLE = 64
"""Weights are joined with others, and cut, at multiples of this many elements only.

It is the most that torch's CPU loops take at once: two vectors of 64 bytes, at two bytes an element. The elements left
over at the end of a tensor are computed one by one and may round differently, because vectors use fused multiply-adds.
So the position of an element in its tensor decides its bits; the address of the tensor does not.
"""

_STAGGER = 17 * 64  # large buffers begin at the same offset in their pages: an update would hit the same cache sets


def side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Tell whether each of these tensors begins where the one before it ends, in the same dtype."""
    return all(
        left.dtype == right.dtype and left.data_ptr() + left.nbytes == right.data_ptr()
        for left, right in pairwise(tensors)
    )


def flat(neighbors: Sequence[Tensor]) -> Tensor:
    """Return a flat tensor over dense tensors that lie side by side; it does not keep their memory alive."""
    assert side_by_side(neighbors)
    nbytes = sum(tensor.nbytes for tensor in neighbors)
    memory = (ctypes.c_char * nbytes).from_address(neighbors[0].data_ptr())
    return torch.frombuffer(memory, dtype=neighbors[0].dtype)


class _Extent(NamedTuple):
    """A number of weights, and of the elements that they have in all."""

    elements: int
    weights: int

    def numbers(self, each_weight: bool) -> int:
        """Return how many numbers a kind of state has for them: one for each weight, or one for each element."""
        return self.weights if each_weight else self.elements


class FlatState:
    """Memory for an optimizer's state, laid out as its weights are.

    There is one buffer for each stretch of weights that lie side by side and each kind of state. The part of a weight
    that has no state is never written to, so the operating system gives it no memory.

    Args:
        masters: The weights.
    """

    def __init__(self, masters: Sequence[Tensor]) -> None:
        # addresses, because an alias of a master would look like one that a user holds
        self._addresses = [(master.data_ptr(), master.dtype) for master in masters]
        self._like = [torch.empty_like(master, device="meta") for master in masters]
        self._stretches: list[_Extent] = []  # of neighbors
        self._where: dict[int, tuple[int, _Extent]] = {}  # each weight's stretch, and the extent before it in there
        last = None
        for index, master in enumerate(masters):
            if master.numel() == 0:  # it takes no memory, so its neighbors lie side by side
                continue
            if last is None or not side_by_side([last, master]):
                self._stretches.append(_Extent(0, 0))
            before = self._stretches[-1]
            self._where[index] = len(self._stretches) - 1, before
            self._stretches[-1] = _Extent(before.elements + master.numel(), before.weights + 1)
            last = master
        self._buffers: dict[tuple[int, str, torch.dtype], Tensor] = {}
        self._places: dict[tuple[int, str, torch.dtype], Tensor] = {}

    def is_for(self, masters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> bool:
        """Tell whether the weights still lie where they lay, and every place still is the state that it was made for.

        If not, the memory is not used again: whoever has set other state may still hold the former, to set it again.
        """
        lie_there = all(
            (new.data_ptr(), new.dtype) == where for new, where in zip(masters, self._addresses, strict=True)
        )
        return lie_there and all(states[index].get(key) is place for (index, key, _), place in self._places.items())

    def place(self, index: int, key: str, like: Tensor) -> Tensor:
        """Return the place of state `key` of a weight: a tensor like the weight, or a scalar if `like` is one."""
        if (index, key, like.dtype) not in self._places:
            self._places[index, key, like.dtype] = self._make_place(index, key, like)
        return self._places[index, key, like.dtype]

    def _make_place(self, index: int, key: str, like: Tensor) -> Tensor:
        stretch, before = self._where[index]
        dtype, one_number = like.dtype, like.dim() == 0
        if (stretch, key, dtype) not in self._buffers:
            nbytes = self._stretches[stretch].numbers(one_number) * dtype.itemsize
            apart = _STAGGER * (1 + len(self._buffers))
            self._buffers[stretch, key, dtype] = torch.empty(apart + nbytes, dtype=torch.uint8)[apart:]
        buffer, shape = self._buffers[stretch, key, dtype], like if one_number else self._like[index]
        return tensor_in(buffer, before.numbers(one_number) * dtype.itemsize, shape, dtype)
