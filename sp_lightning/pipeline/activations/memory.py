"""The memory of saved tensors: a count of what they take on the device, and a pool of what they borrow on the host.

Memory is counted once, however many tensors share it. Weights and buffers do not count, as they would be there anyway.
Counting costs the host some microseconds for each saved tensor, so under `"auto"` only steps that are measured do it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats, readable_bytes
from sp_lightning.pipeline.torch_private import parts_of, storage_key
from sp_lightning.pipeline.weights.buffers import HostBuffer

_PAGE = 4096  # bytes that a buffer takes at least
_size_of = attrgetter("nbytes")


class Footprint(NamedTuple):
    """Device memory that calls of a unit's member take, in bytes, from a forward to its backward."""

    held: int  # inputs that were not held already
    saved: int  # tensors that the forwards saved, beyond the inputs
    large: int  # how much of both is in pieces that are worth a copy to the host
    working: int  # the most that a single call took
    repeatable: bool  # whether the forwards can run again, and doing so saves memory

    def combined_with(self, call: Footprint) -> Footprint:
        """Return the footprint of these calls and another one, between the same forward and backward."""
        return Footprint(
            held=self.held + call.held,
            saved=self.saved + call.saved,
            large=self.large + call.large,
            working=max(self.working, call.working),
            repeatable=self.repeatable and call.repeatable,
        )


class Charge:
    """Memory that counts for as long as this object exists; any thread may end that."""

    __slots__ = ("__weakref__", "_stats", "nbytes")

    def __init__(self, nbytes: int, stats: Stats) -> None:
        self.nbytes = nbytes
        self._stats = stats
        stats.activation_bytes += nbytes
        stats.activation_peak_bytes = max(stats.activation_peak_bytes, stats.activation_bytes)

    def __del__(self) -> None:
        self._stats.activation_bytes -= self.nbytes


class Stretch(NamedTuple):
    """The most memory that a stretch of a step took: a unit's forward or backward, or the turn between the two.

    A softmax over logits is in no graph, but the device's allocator knows of it. The peaks of allocated and of held
    memory need not come at the same time: a loss takes its memory when no unit is at work.
    """

    before: int  # bytes that were held when it began
    saved: int  # bytes that were held, beyond those held when it began
    # bytes that operations took besides; 0 if the device does not tell, or in steps that are not measured
    operations: int


class Meter:
    """Counts device memory into `stats.activation_bytes` and `stats.activation_peak_bytes`."""

    def __init__(self, backend: Backend, stats: Stats, always: bool = True) -> None:
        self.counts = always  # whether it counts in this step
        # identities of the memory of buffers, and of weights that stay on the device; a reference keeps an identity
        # from being given again, as a buffer may be replaced
        self.uncounted: dict[int, StorageWeakRef] = {}
        self.step_peak = 0  # the most bytes that were held since the step began
        self.always = always  # whether to count in all steps, from the next one on
        self._backend = backend
        self._stats = stats
        self._by_memory: WeakValueDictionary[int, Charge] = WeakValueDictionary()
        self._before = 0  # bytes that were held as the stretch began
        self._peak = 0  # the most bytes that were held since
        # bytes that are allocated in any case; None if the device does not tell
        self._baseline: int | None = None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of these tensors no longer, and that of all others."""
        self.uncounted = {}
        for tensor in tensors:
            memory_key = storage_key(tensor)
            if memory_key:
                storage = parts_of(tensor)[0].untyped_storage()
                self.uncounted[memory_key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def hold(self, tensor: Tensor) -> Charge | None:
        """Count the memory of a tensor until the returned object is dropped; None if it does not count."""
        memory_key = storage_key(tensor) if self.counts else 0
        if memory_key == 0 or memory_key in self.uncounted:
            return None
        if tensor.device != self._backend.device or isinstance(tensor, nn.Parameter):
            return None
        charge = self._by_memory.get(memory_key)
        if charge is None:
            charge = Charge(tensor.untyped_storage().nbytes(), self._stats)
            self._by_memory[memory_key] = charge
            self._peak = max(self._peak, self._stats.activation_bytes)
            self.step_peak = max(self.step_peak, self._peak)
        return charge

    def begin_step(self, counts: bool) -> None:
        """Begin a step, which has a peak of its own, and is not measured yet; it may count all the same."""
        self.counts = counts or self.always
        self._baseline = None
        self._begin_stretch()
        self.step_peak = self._peak

    def measure(self, inputs: Sequence[Tensor]) -> None:
        """Count in this step, and measure the memory of operations, before a unit's call with these inputs."""
        self.counts = True
        memory = self._backend.count_peak_anew()
        # inputs are allocated, and count as soon as the call has begun
        charges = [self.hold(tensor) for tensor in inputs]
        self._baseline = None if memory is None else memory.allocated - self._stats.activation_bytes
        del charges

    def end_stretch(self) -> Stretch:
        """End a stretch, and begin another."""
        operations = 0
        if self._baseline is not None:
            memory = self._backend.count_peak_anew()
            if memory is not None:
                operations = max(0, memory.peak - self._baseline - self._peak)
        stretch = Stretch(self._before, self._peak - self._before, operations)
        self._begin_stretch()
        return stretch

    def _begin_stretch(self) -> None:
        self._before = self._stats.activation_bytes
        self._peak = self._before


class HostPool:
    """Lends host memory to activations that leave the device for a while.

    Each step asks for the same sizes. So the first one allocates and pins the buffers, which costs more than copying,
    and all others use them again. If sizes differ from step to step (sentences of any length), a buffer also serves
    smaller requests, and buffers that are too small make room for a larger one.
    """

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.nbytes = 0  # bytes that the pool has
        self._backend = backend
        self._stats = stats
        self._buffers: set[HostBuffer] = set()
        self._free: list[HostBuffer] = []  # by their size

    def take(self, nbytes: int) -> HostBuffer:
        """Lend a buffer of at least this many bytes: the smallest one that is free."""
        size = -(-nbytes // _PAGE) * _PAGE
        smallest = bisect.bisect_left(self._free, size, key=_size_of)
        if smallest < len(self._free):
            return self._free.pop(smallest)
        if self._free:  # all of them are too small, and make room
            self._stats.host_syncs += 1
            self._backend.drain()  # the device may still be reading buffers that were returned
            self._release(self._free)
        free = available_host_memory()
        if free is not None and size > free:
            raise RuntimeError(
                f"CPU memory is too small for offloaded activations: {readable_bytes(self.nbytes)} "
                f"are in use, {readable_bytes(size)} more are needed and "
                f"{readable_bytes(free)} are free. Use a smaller batch, `activations='recompute'`, "
                "or a machine with more memory."
            )
        buffer = HostBuffer(size, self._backend, pin=True)
        self._buffers.add(buffer)
        self.nbytes += size
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a buffer back. The next computation must have waited for copies into and out of it."""
        if buffer in self._buffers:  # not if the pool was closed meanwhile
            bisect.insort(self._free, buffer, key=_size_of)

    def close(self) -> None:
        """Unpin the memory; it exists for as long as a tensor is in it."""
        self._release(list(self._buffers))

    def _release(self, buffers: list[HostBuffer]) -> None:
        self._buffers.difference_update(buffers)
        self._free = []
        for buffer in buffers:
            self.nbytes -= buffer.nbytes
            buffer.release()
