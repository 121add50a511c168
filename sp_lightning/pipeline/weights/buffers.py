"""Memory for tensors that are sent together: their layout, and page-aligned buffers on the host.

All weights, gradients and activations that are copied between host and device lie in such buffers.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.processes.box import SharedMemory

# bytes; the strictest that kernels and quantized formats require of a tensor's address
ALIGNMENT = 256
# Linux's MADV_WIPEONFORK and MADV_KEEPONFORK; Python has no names for them
_WIPE_ON_FORK = 18
_KEEP_ON_FORK = 19
_HUGE_PAGES = 14  # MADV_HUGEPAGE


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for pieces of these sizes, and the bytes in all."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def tensor_in(memory: Tensor, offset: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a tensor with the shape and strides of `like` over bytes of `memory`, with a storage of its own.

    A view of the buffer would drag the whole buffer into `torch.save`, would make safetensors think that all weights
    are tied, and would share one version counter with everything else in the buffer.
    """
    start = memory.storage_offset() + offset
    storage = memory.untyped_storage()[start : start + like.numel() * dtype.itemsize]
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(storage, 0, like.size(), like.stride())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as a tensor of bytes."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = tensor.storage_offset() * tensor.element_size()
        return empty.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def _map_pages(nbytes: int) -> mmap.mmap:
    # Python's default is MAP_SHARED: forked workers would write into our weights
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def _advise(pages: mmap.mmap, advice: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # this kernel does not know the advice
            pages.madvise(advice)


class HostBuffer:
    """Page-aligned host memory of exactly the bytes asked for, pinned (page-locked) where asked for and possible.

    If the device is an accelerator, forked processes such as a loader's workers find zeros in it until it is released.
    Otherwise the first write to a page after a fork would copy the page: it would take memory twice, and the device
    might go on reading the old one. In plain training, workers cannot use weights either, as these are on the device.
    """

    def __init__(
        self,
        nbytes: int,
        backend: Backend,
        pin: bool,
        memory: Tensor | SharedMemory | None = None,
    ) -> None:
        self._wiped: mmap.mmap | None = None
        self.pinned = False
        self.shared: SharedMemory | None = None  # the memory, if processes share it
        if isinstance(memory, SharedMemory):
            self.shared = memory
            memory = memory.bytes
        elif memory is None:
            pages = _map_pages(max(nbytes, 1))
            if backend.device.type != "cpu":
                # The driver pins page by page: pages of 2 MiB are 512 times fewer. Memory that is in use already would
                # have to be copied, so this comes before the first write.
                _advise(pages, _HUGE_PAGES)
                _advise(pages, _WIPE_ON_FORK)
                self._wiped = pages
            with torch.inference_mode(False):
                memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        self.bytes: Tensor = memory  # the memory; empty once it was released
        self.nbytes = memory.nbytes  # the size, which stays when the memory is released
        # Buffers next to the masters: for their copies, gradients and optimizer state, by purpose.
        self.companions: dict[str, HostBuffer] = {}
        self._backend = backend
        if pin:
            self.pin()

    @property
    def masters(self) -> Tensor:
        """The memory that user code gets."""
        return self.bytes if self.shared is None else self.shared.own

    def pin(self) -> None:
        """Pin the memory, if the backend does and it is possible."""
        if self._backend.pins and not self.pinned and self.nbytes:
            self.pinned = True  # an interrupt may come when the system has pinned it already
            self.pinned = self._backend.pin(self.bytes)

    def unpin(self) -> None:
        """Undo `pin`."""
        if self.pinned:
            self._backend.unpin(self.bytes)
            self.pinned = False

    def release(self) -> None:
        """Unpin the memory, share it with forked processes again, and release it and its companions.

        Tensors in the memory keep it alive. This object does not, even if reference cycles keep the object until the
        garbage collector runs.
        """
        for purpose in list(self.companions):
            self.release_companion(purpose)
        self.unpin()
        if self._wiped is not None:
            _advise(self._wiped, _KEEP_ON_FORK)
        self._wiped = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def get_companion(self, purpose: str, nbytes: int, pin: bool, together: bool = False) -> HostBuffer:
        """Return a buffer of this size next to the weights; it stays when weights are placed again.

        With `together`, the processes that share the weights share the buffer, too.
        """
        if purpose not in self.companions or self.companions[purpose].nbytes != nbytes:
            self.release_companion(purpose)
            shared: SharedMemory | None = None
            if together and self.shared is not None:
                shared = self.shared.box.share(nbytes, self.shared.names)
                shared.close_file()
            self.companions[purpose] = HostBuffer(nbytes, self._backend, pin, shared)
        return self.companions[purpose]

    def release_companion(self, purpose: str) -> None:
        """Release the buffer next to the weights for this purpose, if there is one."""
        if purpose in self.companions:
            self.companions.pop(purpose).release()
