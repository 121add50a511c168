"""Segments: host memory of the weights of a unit that are sent in one copy, its frozen ones or its trained ones.

A segment goes to the device in one copy, so everything that it sends lies together. Weights that are sent in the dtype
in which they are kept are sent from where their masters lie. Of a segment that autocast lowers, copies in the dtype
that is sent lie together beside the masters, written once per change of these.

[Note: epochs]
A segment's epoch grows with every change of its masters: an optimizer's step, a write that torch counts, one that a
sample shows, other memory (`p.data = ...`). A group notes the epochs that lie in its place. So beside adapters that are
stepped, a frozen base that still lies there is not sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.weights.buffers import HostBuffer, as_bytes, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight

_SAMPLED = 224  # elements of a segment: each costs a cache miss
_LEAST_SAMPLED = 4  # of a weight
_WORD = 4  # bytes


class Segment:
    """Weights that lie together in host memory, and are sent in one copy."""

    def __init__(
        self, weights: Sequence[Weight], backend: Backend, pin: bool, memory: HostBuffer | None = None
    ) -> None:
        self.weights = list(weights)
        # where each weight begins in what is sent, and how much that is
        self.offsets, self.nbytes = lay_out([weight.compute_bytes for weight in weights])
        self.epoch = 0  # grows with every change of a master; see [Note: epochs]
        self.memory = memory or self._move_into_new_memory(backend)  # the memory that the masters lie in
        for weight, tensor in zip(self.weights, self.memory.tensors, strict=True):
            weight.host = weight.home = tensor
        # for each weight the copy that is sent; None where the master itself is
        self.copies: list[Tensor | None] = [None] * len(self.weights)
        self.source = self.memory  # the memory that is sent: the same, or that of copies in the dtype that is sent
        if any(weight.lowered for weight in weights):
            self.memory.unpin()
            self.source = HostBuffer(self.nbytes, backend, pin)
            self.copies = [
                tensor_in(self.source.bytes, offset, weight.layout, weight.compute_dtype)
                for weight, offset in zip(self.weights, self.offsets, strict=True)
            ]
        elif pin:
            self.memory.pin()
        self.sends_copies = self.source is not self.memory
        self._copied_epoch = -1
        self._copies_are_stale = True
        self._masters = [weight.master for weight in self.weights]
        self._all_plain = all(type(weight) is Weight for weight in self.weights)  # others consist of several tensors
        self._pointers: list[int] = []
        self._versions: list[int] = []
        self._sample: Tensor | None = None
        self.look_anew()
        with torch.inference_mode(False):
            self._words = self.memory.bytes[: self.memory.nbytes // _WORD * _WORD].view(torch.int32)
        self._sampled = _words_to_sample(self.weights, self._words)

    def _move_into_new_memory(self, backend: Backend) -> HostBuffer:
        offsets, nbytes = lay_out([weight.nbytes for weight in self.weights])
        memory = HostBuffer(nbytes, backend, pin=False)
        for weight, offset in zip(self.weights, offsets, strict=True):
            weight.adopt(tensor_in(memory.bytes, offset, weight.layout, weight.dtype))
        memory.tensors = [weight.host for weight in self.weights]
        return memory

    # -------------------------------------------------------------------------------------------------- their changes

    def check(self) -> None:
        """Note changes of masters since the last look, also those that torch does not count."""
        if self._have_moved() | self._are_other_versions() or self._differs_from_sample():
            self.note_change()

    def look_anew(self) -> None:
        """Take the masters as they are: nothing was sent of them, or just what they are now."""
        self._have_moved()
        self._are_other_versions()
        self._sample = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether a master may have been given other memory since the last look."""
        return not self._all_plain or self._pointers != [master.data_ptr() for master in self._masters]

    def _have_moved(self) -> bool:
        """Find masters that were given other memory, and tell whether one has, or had, such memory."""
        if not self.is_elsewhere:
            return False
        moved = [weight.follow() for weight in self.weights]
        at_home = all(weight.host is weight.home for weight in self.weights)
        self._pointers = [master.data_ptr() for master in self._masters] if at_home else []
        return True in moved

    def _are_other_versions(self) -> bool:
        before = self._versions
        if self._all_plain:
            self._versions = [master._version for master in self._masters]
        else:
            self._versions = [weight.version for weight in self.weights]
        return self._versions != before

    def note_change(self) -> None:
        """Note that masters have changed."""
        self.epoch += 1
        self._sample = None

    def begin_stepping(self) -> None:
        """Note that an optimizer is about to step masters, and write the copies of these."""
        self._copies_are_stale = self._copied_epoch != self.epoch
        self.note_change()

    def note_stepped(self) -> None:
        """Note that masters are as an optimizer's step has left them, and the copies that are sent like them."""
        self._are_other_versions()
        self._copied_epoch = self.epoch
        self._sample = self._look()

    def take_sample(self) -> None:
        """Remember some of the masters' elements, so that a change which torch does not count shows."""
        if self._sample is None:
            self._sample = self._look()

    def _differs_from_sample(self) -> bool:
        return self._sample is not None and not torch.equal(self._look(), self._sample)

    def _look(self) -> Tensor:
        return self._words.take(self._sampled)

    # ----------------------------------------------------------------------------------------------------- the copies

    def refresh_copies(self) -> None:
        """Bring the copies that are sent up to date."""
        if self.sends_copies and self._copied_epoch != self.epoch:
            self._copy_all_but(())
            self._copied_epoch = self.epoch
            self.take_sample()

    def refresh_other_copies(self, stepped: Collection[Weight]) -> None:
        """Bring copies up to date, if they are not, of weights that are not stepped in the step under way."""
        if self.sends_copies and self._copies_are_stale:
            self._copy_all_but(stepped)

    def _copy_all_but(self, stepped: Collection[Weight]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                if copy is not None and weight not in stepped:
                    copy.copy_(weight.host)

    def ranges(self) -> list[tuple[int, Tensor]]:
        """Return what to send: bytes, each with where they begin in the segment's place."""
        elsewhere = [] if self.sends_copies else [weight for weight in self.weights if weight.host is not weight.home]
        if not elsewhere:
            return [(0, self.source.bytes)]
        values = [weight.host if weight in elsewhere else weight.home for weight in self.weights]
        return [(offset, as_bytes(value)) for offset, value in zip(self.offsets, values, strict=True)]

    def piece_of(self, weight: Weight, backend: Backend) -> HostBuffer:
        """Return the memory of one master, with the padding after it, as a buffer that is not pinned itself."""
        begin = weight.home.data_ptr() - self.memory.bytes.data_ptr()
        _, nbytes = lay_out([weight.nbytes])
        piece = HostBuffer(nbytes, backend, pin=False, memory=self.memory.bytes[begin : begin + nbytes])
        piece.tensors = [weight.home]
        return piece

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for these weights, without gradients."""
        return self.memory.nbytes + (self.source.nbytes if self.sends_copies else 0)

    def release_copies(self) -> None:
        """Let go of the copies that are sent."""
        if self.sends_copies:
            self.source.release()
            self.copies = []


class HostMemory:
    """The memory that masters lie in, from one arrangement to the next: masters that stay together do not move."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, ...], HostBuffer] = {}  # by the identities of the masters in it

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def find(self, weights: Sequence[Weight]) -> HostBuffer | None:
        """Return the memory in which the masters of just these weights lie, in this order."""
        memory = self._buffers.get(_identities(weights))
        if memory is None or not all(map(Weight.lies_in, weights, memory.tensors)):
            return None
        return memory

    def keep(self, segments: Sequence[Segment]) -> None:
        """Keep the memory of these segments, and release all other, in which no master lies any more."""
        kept = {_identities(segment.weights): segment.memory for segment in segments}
        for buffer in set(self._buffers.values()).difference(kept.values()):
            buffer.release()
        self._buffers = kept


def _identities(weights: Sequence[Weight]) -> tuple[int, ...]:
    return tuple(id(weight.master) for weight in weights)


def _words_to_sample(weights: Sequence[Weight], words: Tensor) -> Tensor:
    """Choose the words that are sampled, by index: all words of elements that are spread over every weight."""
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.empty(0, dtype=torch.long)]
    samples = max(_LEAST_SAMPLED, _SAMPLED // max(1, len(weights)))
    start = words.data_ptr()
    with torch.inference_mode(False):
        for weight in weights:
            home, size = weight.home, weight.home.element_size()
            count = min(samples, home.numel())
            offsets = torch.arange(count) * (home.numel() / max(count, 1))
            offsets += torch.rand(count, generator=generator) * (home.numel() / max(count, 1))
            first = (home.data_ptr() - start + offsets.long().clamp(max=home.numel() - 1) * size) // _WORD
            chosen.append((first[:, None] + torch.arange(max(1, size // _WORD))).flatten())
        return torch.cat(chosen).clamp(max=max(0, words.numel() - 1))
