"""The host side of a group: its masters, what is sent of them, and whether they have changed.

A group goes to the device in one copy, so everything that it sends must lie together. Where weights are sent in the
dtype in which they are kept, the masters themselves are sent; where autocast would lower one of them, a second buffer
holds copies in the dtypes that are sent, written once per change of the masters. So does one for masters that have to
stay where they are, apart (master_memory.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.sections import divide
from sp_lightning.pipeline.weights.weight import Weight

_GLANCE = 256  # words
_WORD = 4  # bytes compared at once
_LEAST_SAMPLES, _MOST_SAMPLES = 64, 1 << 17  # per weight


class MasterState(NamedTuple):
    """The version counters of masters, and a sample of their bytes.

    `.data.copy_` (EMA, weight averaging, pruning) does not bump the version counter, hence the sample.
    """

    versions: tuple[int, ...]
    sample: Tensor


class GroupHost:
    """The host side of a group.

    Args:
        weights: The weights, in the order in which they lie in memory.
        backend: Pins the memory.
        pin: Whether to pin the memory that is sent.
        masters: The buffer that the masters already lie in, if an earlier arrangement has made it.
        pieces: Where masters lie apart: for each weight the memory that its master has to stay in, or None.

    Attributes:
        masters: The buffer that all masters lie in; None if they lie apart.
        sends_copies: Whether copies are sent instead of the masters themselves.
        sends_lowered: Whether some of the copies are in a lower dtype.
        source: The memory that is sent.
        source_offsets: Where each weight begins in it, in bytes.
        sections: The sections of the memory that is sent.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        backend: Backend,
        pin: bool,
        masters: HostBuffer | None = None,
        pieces: Sequence[HostBuffer | None] = (),
    ) -> None:
        self.weights = list(weights)
        self._offsets, self.master_bytes = lay_out([weight.nbytes for weight in self.weights])
        self._backend = backend
        self.sends_lowered = any(weight.lowered for weight in self.weights)
        self.sends_copies = bool(pieces) or self.sends_lowered
        self._pieces: list[HostBuffer] = []
        if pieces:
            self._pieces = [
                piece or self._new_masters([weight], *lay_out([weight.nbytes]), pin=False)
                for weight, piece in zip(self.weights, pieces, strict=True)
            ]
        elif masters is None:
            masters = self._new_masters(self.weights, self._offsets, self.master_bytes, pin and not self.sends_copies)
        elif self.sends_copies:
            masters.unpin()
        elif pin:
            masters.pin()
        self.masters = masters
        memories = self._pieces if masters is None else [masters]
        for weight, tensor in zip(self.weights, chain.from_iterable(m.tensors for m in memories), strict=False):
            weight.host = tensor
        with torch.inference_mode(False):
            self._words = [
                memory.bytes[: memory.bytes.nbytes // _WORD * _WORD].view(torch.int32) for memory in memories
            ]
        self._sample_index = self._sampled_words()
        self._glance_index = self._sample_index[:: max(1, len(self._sample_index) // _GLANCE)].contiguous()
        self._copies: list[Tensor] = []
        if self.sends_copies:
            self.source_offsets, nbytes = lay_out([weight.compute_bytes for weight in self.weights])
            self.source = HostBuffer(nbytes, backend, pin)
            self._copies = [
                tensor_in(self.source.bytes, offset, weight.layout, weight.compute_dtype)
                for weight, offset in zip(self.weights, self.source_offsets, strict=True)
            ]
        else:
            assert masters is not None
            self.source_offsets, self.source = self._offsets, masters
        dtypes = [weight.compute_dtype for weight in self.weights]
        self.sections = divide(
            [weight.layout for weight in self.weights], self.source_offsets, dtypes, self.source.nbytes
        )
        self._copied_state: MasterState | None = None  # of the masters when copies were made of them

    def state(self) -> MasterState:
        """Return the masters' present state."""
        with torch.inference_mode(False):
            return MasterState(self._versions(), self._read(self._sample_index))

    def glance(self) -> MasterState:
        """Return the masters' present state with a smaller sample, for every call of a unit."""
        with torch.inference_mode(False):
            return MasterState(self._versions(), self._read(self._glance_index))

    def changed_past_versions(self, since: MasterState) -> set[Weight]:
        """Return the weights that look different than in an earlier glance, although no change of them was counted."""
        now = self.glance()
        with torch.inference_mode(False):
            if torch.equal(now.sample, since.sample):
                return set()
            places = self._glance_index[now.sample != since.sample] * _WORD
        found = {self.weights[bisect_right(self._offsets, place) - 1] for place in places.tolist()}
        counted = zip(self.weights, since.versions, now.versions, strict=True)
        return found.difference(weight for weight, before, after in counted if before != after)

    def has_changed(self, since: MasterState) -> bool:
        """Tell whether masters have been written to since they were in this state."""
        if self._versions() != since.versions:
            return True
        with torch.inference_mode(False):
            return not torch.equal(self._read(self._sample_index), since.sample)

    def prepare(self, state: MasterState) -> Tensor:
        """Return the bytes to send, with copies brought up to date.

        Args:
            state: The masters' present state.
        """
        if self.sends_copies and self._copied_state is not state:
            for weight, target in zip(self.weights, self._copies, strict=True):
                target.copy_(weight.host)
            self._copied_state = state
        return self.source.bytes

    def copies(self) -> Sequence[Tensor | None]:
        """Return, for each weight, the copy that is sent, to write to; None where the master itself is sent."""
        return self._copies or [None] * len(self.weights)

    def copies_match(self, state: MasterState | None) -> bool:
        """Tell whether the copies were made of masters in this state, and the masters still are in it."""
        if not self.sends_copies or state is None:
            return False
        return self._copied_state is state and not self.has_changed(state)

    def refresh_copies(self, stepped: Collection[Weight]) -> None:
        """Bring the copies up to date, except those of weights that are being stepped."""
        if not self.sends_copies:
            return
        for weight, target in zip(self.weights, self._copies, strict=True):
            if weight not in stepped:
                target.copy_(weight.host)

    def note_copies(self) -> MasterState:
        """Note that the copies are up to date, and return the masters' state."""
        self._copied_state = self.state()
        return self._copied_state

    def readopt(self) -> None:
        """Take the values of masters that were given other memory (`p.data = ...`) back into ours."""
        for weight in self.weights:
            if weight.is_elsewhere:
                weight.check_not_held()
                weight.readopt()

    def _versions(self) -> tuple[int, ...]:
        """Return a number for each master that grows with every change that torch counts, and when it is replaced."""
        self.readopt()
        return tuple(weight.version + weight.replacements for weight in self.weights)

    def piece_of(self, weight: Weight) -> HostBuffer:
        """Return the memory of one of the masters, with the padding after it, as a buffer that is not pinned itself."""
        index = self.weights.index(weight)
        if self.masters is None:
            return self._pieces[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self.master_bytes
        memory = self.masters.bytes[self._offsets[index] : end]
        piece = HostBuffer(memory.nbytes, self._backend, pin=False, memory=memory)
        piece.tensors = [weight.host]
        return piece

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for these weights, without gradients."""
        return self.master_bytes + (self.source.nbytes if self.source is not self.masters else 0)

    def release(self) -> None:
        """Let go of the memory; that of masters serves the next arrangement, too, for which `MasterMemory` has it."""
        if self.source is not self.masters:
            self.source.release()
        for tensors in (self._copies, self._words, self._pieces):
            tensors.clear()

    def _new_masters(self, weights: Sequence[Weight], offsets: Sequence[int], nbytes: int, pin: bool) -> HostBuffer:
        """Make a buffer, and move these masters into it."""
        masters = HostBuffer(nbytes, self._backend, pin)
        for weight, offset in zip(weights, offsets, strict=True):
            weight.adopt(tensor_in(masters.bytes, offset, weight.layout, weight.dtype))
        masters.tensors = [weight.host for weight in weights]
        return masters

    def _read(self, index: Tensor) -> Tensor:
        """Return sampled words of the masters; the index counts as if all of them lay together."""
        if self.masters is not None:
            return self._words[0].index_select(0, index)
        starts = torch.tensor([offset // _WORD for offset in self._offsets])
        counts = torch.bincount(torch.searchsorted(starts, index, right=True) - 1, minlength=len(starts)).tolist()
        parts = zip(self._words, starts, torch.split(index, counts), strict=True)
        return torch.cat([words.index_select(0, part - start) for words, start, part in parts])

    def _sampled_words(self) -> Tensor:
        """Choose the words that a `MasterState` samples, by index: all words of the sampled elements."""
        generator = torch.Generator().manual_seed(0)
        chosen = [torch.empty(0, dtype=torch.long)]
        with torch.inference_mode(False):
            for weight, offset in zip(self.weights, self._offsets, strict=True):
                if weight.host.numel():
                    nbytes = weight.host.element_size()
                    first = (offset + _sampled_elements(weight.host, generator) * nbytes) // _WORD
                    chosen.append((first[:, None] + torch.arange(max(1, nbytes // _WORD))).flatten())
            return torch.cat(chosen)


def _sampled_elements(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Choose elements of a tensor, by their offsets in memory, such that a change of any one row is seen.

    Each row has one at a random place. If there are more than `_MOST_SAMPLES` rows, that many have one, evenly spread.
    """
    rows = tensor.size(0) if tensor.dim() else 1
    samples = min(max(rows, _LEAST_SAMPLES), _MOST_SAMPLES)
    offsets = torch.zeros(samples, dtype=torch.long)
    for dimension, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        numbers = torch.randint(size, (samples,), generator=generator)  # for rows, too: later draws depend on it
        if dimension == 0:
            numbers = torch.arange(samples) * size // samples if samples < size else torch.arange(samples) % size
        offsets += numbers * stride
    return offsets
