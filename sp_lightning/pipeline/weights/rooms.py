"""Rooms: pieces of host memory that masters lie in, and whether what lies there has changed.

The host side of a group (host.py) has one room, or several. Rooms outlive an arrangement (master_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight

_WORD = 4  # bytes compared at once
_LEAST_SAMPLES = 64  # per weight


class Room:
    """Masters that lie in one piece of host memory.

    Args:
        weights: The weights whose masters they are, in the order in which they lie there.
        offsets: Where each of them begins, in bytes.
        memory: The memory. If masters already lie in it, it has their tensors; otherwise they move in.
    """

    def __init__(self, weights: Sequence[Weight], offsets: Sequence[int], memory: HostBuffer) -> None:
        self.weights = list(weights)
        self.offsets = list(offsets)
        self.memory = memory
        if memory.tensors:
            for weight, tensor in zip(self.weights, memory.tensors, strict=True):
                weight.host = tensor
        else:
            for weight, offset in zip(self.weights, self.offsets, strict=True):
                weight.adopt(tensor_in(memory.bytes, offset, weight.layout, weight.dtype))
            memory.tensors = [weight.host for weight in self.weights]
        with torch.inference_mode(False):
            self._words = memory.bytes[: memory.nbytes // _WORD * _WORD].view(torch.int32)
        self._sample_index = self._sampled_words()

    def sample(self) -> Tensor:
        """Return some of what lies here: words of every row of every master."""
        return self._words.index_select(0, self._sample_index)

    def differing(self, before: Tensor, after: Tensor) -> list[Weight]:
        """Return the weights that two samples differ in."""
        if torch.equal(before, after):
            return []
        places = self._sample_index[before != after] * _WORD
        numbers = torch.searchsorted(torch.tensor(self.offsets), places, right=True) - 1
        return [self.weights[number] for number in sorted(set(numbers.tolist()))]

    def piece_of(self, weight: Weight, backend: Backend) -> HostBuffer:
        """Return the memory of one of the masters, with the padding after it, as a buffer that is not pinned itself."""
        begin = self.offsets[self.weights.index(weight)]
        memory = self.memory.bytes[begin : begin + padded(weight)]
        piece = HostBuffer(memory.nbytes, backend, pin=False, memory=memory)
        piece.tensors = [weight.host]
        return piece

    def release(self) -> None:
        """Let go of the memory, which serves the next arrangement."""
        self._words = torch.empty(0, dtype=torch.int32)

    def _sampled_words(self) -> Tensor:
        """Choose the words that a sample has, by index: all words of the sampled elements."""
        generator = torch.Generator().manual_seed(0)
        chosen = [torch.empty(0, dtype=torch.long)]
        with torch.inference_mode(False):
            for weight, offset in zip(self.weights, self.offsets, strict=True):
                if weight.host.numel():
                    nbytes = weight.host.element_size()
                    elements = _sampled_elements(weight.host, weight.most_samples, generator)
                    first = (offset + elements * nbytes) // _WORD
                    chosen.append((first[:, None] + torch.arange(max(1, nbytes // _WORD))).flatten())
            return torch.cat(chosen)


def padded(weight: Weight) -> int:
    """Return the bytes that a master takes in a room."""
    return lay_out([weight.nbytes])[1]


def _sampled_elements(tensor: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Choose elements of a tensor, by their offsets in memory, such that a change of any one row is seen.

    Each row has one at a random place. If there are more rows than elements at most, that many have one, evenly spread.
    """
    rows = tensor.size(0) if tensor.dim() else 1
    samples = min(max(rows, _LEAST_SAMPLES), max(most, _LEAST_SAMPLES))
    offsets = torch.zeros(samples, dtype=torch.long)
    for dimension, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        numbers = torch.randint(size, (samples,), generator=generator)  # for rows, too: later draws depend on it
        if dimension == 0:
            numbers = torch.arange(samples) * size // samples if samples < size else torch.arange(samples) % size
        offsets += numbers * stride
    return offsets
