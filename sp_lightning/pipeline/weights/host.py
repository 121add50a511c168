"""Host memory: one exact, contiguous buffer per group of units, with the masters as tensors inside it.

A group is copied to the device with one copy, so everything it sends must lie together. Where a weight is sent in
the dtype it is kept in, the masters themselves are what is sent; where autocast would lower it, a second buffer
holds the lowered copy, written once per change of the masters.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.weight import Weight

ALIGNMENT = 256  # bytes; what the strictest kernels and quantised formats ask of a tensor's address
_WORD = 4  # bytes compared at once
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19  # Linux's numbers, which Python has no names for
_LEAST_SAMPLES, _MOST_SAMPLES = 64, 1 << 17  # of one weight


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets for pieces of these many bytes, and the bytes in all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def tensor_in(memory: Tensor, offset: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape and strides of `like` over bytes of `memory`, with a storage of its own.

    A storage of its own, because a view of the buffer would drag the whole buffer into `torch.save`, would make
    safetensors think that all weights are tied, and would share one version counter with everything else in it.
    """
    start = memory.storage_offset() + offset
    storage = memory.untyped_storage()[start : start + like.numel() * dtype.itemsize]
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=memory.device).set_(storage, 0, like.size(), like.stride())


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its bytes exactly once (in any order of dimensions, so channels_last is dense)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _map_pages(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # Python's default is shared: forked workers would write into our weights
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def _advise(pages: mmap.mmap, advice: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel that is older than the advice
            pages.madvise(advice)


class HostBuffer:
    """Page-aligned host memory of exactly the bytes asked for, page-locked where asked for and possible.

    Beside an accelerator it is not there for forked processes, a loader's workers, until it is released. Else a page is
    copied when it is written to after a fork: memory is taken twice, and the device may go on with the old page. What
    lies on the device in plain training cannot be used by them either.

    Attributes:
        bytes: The memory.
        pinned: Whether it is page-locked.
        tensors: What the weights in it are held by: the same tensors in all arrangements, so that others can be told
            by how many there are.
    """

    def __init__(self, nbytes: int, backend: Backend, pin: bool, memory: Tensor | None = None) -> None:
        self._wiped: mmap.mmap | None = None
        if memory is None:
            pages = _map_pages(max(nbytes, 1))
            if backend.device.type != "cpu":
                _advise(pages, _WIPE_ON_FORK)
                self._wiped = pages
            with torch.inference_mode(False):
                memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        self.bytes = memory
        self.tensors: list[Tensor] = []
        self._backend = backend
        self.pinned = False
        if pin:
            self.pin()

    def pin(self) -> None:
        """Page-lock the memory, if that is possible."""
        if not self.pinned and self.bytes.nbytes:
            self.pinned = self._backend.pin(self.bytes)

    def release(self) -> None:
        """Undo the page-lock; the memory itself lives as long as a tensor lies in it."""
        if self.pinned:
            self._backend.unpin(self.bytes)
            self.pinned = False
        if self._wiped is not None:
            _advise(self._wiped, _KEEP_ON_FORK)
            self._wiped = None


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = tensor.storage_offset() * tensor.element_size()
        return empty.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


class MasterState(NamedTuple):
    """Version counters of masters, and a sample of their bytes.

    `.data.copy_` (EMA, weight averaging, pruning) does not move the version counter, hence the sample.
    """

    versions: tuple[int, ...]
    sample: Tensor


class GroupHost:
    """The host side of the weights that travel together.

    Args:
        weights: The weights, in the order in which they lie.
        backend: Pins the memory.
        pin: Whether to page-lock what is sent.
        masters: The buffer that the masters already lie in, if an earlier pipeline of the same weights left one.
    """

    def __init__(
        self, weights: Sequence[Weight], backend: Backend, pin: bool, masters: HostBuffer | None = None
    ) -> None:
        self.weights = list(weights)
        self._offsets, self.master_bytes = lay_out([weight.master.nbytes for weight in self.weights])
        lowered = any(weight.lowered for weight in self.weights)
        if masters is None:
            masters = HostBuffer(self.master_bytes, backend, pin and not lowered)
            for weight, offset in zip(self.weights, self._offsets, strict=True):
                weight.adopt(tensor_in(masters.bytes, offset, weight.master, weight.master.dtype))
            masters.tensors = [weight.host for weight in self.weights]
        elif lowered:
            masters.release()
        elif pin:
            masters.pin()
        for weight, tensor in zip(self.weights, masters.tensors, strict=False):
            weight.host = tensor
        self.masters = masters
        with torch.inference_mode(False):
            self._words = masters.bytes[: masters.bytes.nbytes // _WORD * _WORD].view(torch.int32)
        self._sample_index = self._sampled_words()
        self._lowered: list[Tensor] = []
        if lowered:
            self.source_offsets, nbytes = lay_out([weight.compute_bytes for weight in self.weights])
            self.source = HostBuffer(nbytes, backend, pin)
            self._lowered = [
                tensor_in(self.source.bytes, offset, weight.master, weight.compute_dtype)
                for weight, offset in zip(self.weights, self.source_offsets, strict=True)
            ]
        else:
            self.source_offsets, self.source = self._offsets, masters
        self._sent: MasterState | None = None

    def state(self) -> MasterState:
        """What tells whether masters have changed."""
        with torch.inference_mode(False):
            return MasterState(self._versions(), self._words[self._sample_index])

    def has_changed(self, since: MasterState) -> bool:
        """Whether masters have been written to since then."""
        if self._versions() != since.versions:
            return True
        with torch.inference_mode(False):
            return not torch.equal(self._words[self._sample_index], since.sample)

    @property
    def keeps_lowered_copies(self) -> bool:
        """Whether what is sent is not the masters themselves."""
        return bool(self._lowered)

    def prepare(self, state: MasterState) -> Tensor:
        """The bytes to send, brought up to date with the masters, whose state this is."""
        if self._lowered and self._sent is not state:
            for weight, target in zip(self.weights, self._lowered, strict=True):
                target.copy_(weight.host)
            self._sent = state
        return self.source.bytes

    def copies(self) -> Sequence[Tensor | None]:
        """For each weight the lowered copy that is sent, as a tensor to write; None where the master itself is sent."""
        return self._lowered or [None] * len(self.weights)

    def copies_are_those_of(self, state: MasterState | None) -> bool:
        """Whether the lowered copies are of masters that were in this state, and still are."""
        return bool(self._lowered) and state is not None and self._sent is state and not self.has_changed(state)

    def stepped(self, copied: Collection[Weight]) -> MasterState:
        """Masters were stepped.

        Args:
            copied: Weights whose lowered copies are right.

        Returns:
            What the masters are now.
        """
        for weight, target in zip(self.weights, self._lowered, strict=False):
            if weight not in copied:
                target.copy_(weight.host)
        self._sent = self.state()
        return self._sent

    def readopt(self) -> None:
        """Masters may have been given other memory (`p.data = ...`): take its values back into ours."""
        for weight in self.weights:
            weight.readopt()

    def _versions(self) -> tuple[int, ...]:
        self.readopt()
        return tuple(weight.master._version for weight in self.weights)

    def memory_of(self, weight: Weight) -> Tensor:
        """The bytes of one of the masters, with the padding after them."""
        index = self.weights.index(weight)
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self.master_bytes
        return self.masters.bytes[self._offsets[index] : end]

    def host_bytes(self) -> int:
        """Bytes of host memory held for these weights, without gradients."""
        return self.masters.bytes.nbytes + (self.source.bytes.nbytes if self.source is not self.masters else 0)

    def release_copies(self) -> None:
        """Undo the page-lock of lowered copies; the masters' memory serves the next arrangement, too."""
        if self.source is not self.masters:
            self.source.release()

    def _sampled_words(self) -> Tensor:
        """Indices of words of every weight: at random places, one in every row, so that no row changes unseen."""
        generator = torch.Generator().manual_seed(0)
        chosen = [torch.empty(0, dtype=torch.long)]
        with torch.inference_mode(False):
            for weight, offset in zip(self.weights, self._offsets, strict=True):
                host = weight.host
                if host.numel() == 0:
                    continue
                rows = host.size(0) if host.dim() else 1
                samples = min(max(rows, _LEAST_SAMPLES), _MOST_SAMPLES)
                elements = torch.zeros(samples, dtype=torch.long)
                for dimension, (size, stride) in enumerate(zip(host.size(), host.stride(), strict=True)):
                    anywhere = torch.randint(size, (samples,), generator=generator)
                    every = torch.arange(samples) % size if samples >= size else torch.arange(samples) * size // samples
                    elements += (every if dimension == 0 else anywhere) * stride
                words_each = torch.arange(max(1, host.element_size() // _WORD))
                words = (offset + elements * host.element_size()) // _WORD
                chosen.append((words[:, None] + words_each).flatten())
            return torch.cat(chosen)


def available_host_memory() -> int | None:
    """Bytes of host memory that are free now, where the system tells."""
    return _from_meminfo("MemAvailable")


def total_host_memory() -> int | None:
    """Bytes of host memory, where the system tells."""
    return _from_meminfo("MemTotal")


def _from_meminfo(name: str) -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except OSError:
        return None
