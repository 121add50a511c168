"""Saved activations that wait on the host: sent as the next unit begins, fetched one unit ahead of backward.

[Note: the life of an activation]
While a unit's forward runs, the engine only notes what autograd saves. When the next unit begins, each piece of that
memory is copied to the host once, however many views of it were saved (q, k and v of one projection). The device memory
is held until the next unit is left. Then computing waits for the copy, so the next user of that memory writes to it
after the copy has read it. Backward fetches the activations of the unit before the one that it reaches, and autograd
frees them node by node, like everything that it saves. The last unit's activations never leave ([Note: the turn] in
policy.py). So about two units' activations are on the device at any time, in forward and in backward; or two members',
if several modules make a unit: a unit's size is about weights, and its members may save a lot.

    forward of unit   3              4              5              the turn
      3's activations are saved      leave          are on the host
      4's                            are saved      leave          are on the host
      5's                                           are saved      stay
    backward of unit  5              4              3
      3's                            come back      are used, freed

Memory is identified by its storage, to which only a weak reference is held once it has left the device. Host memory
goes back to the pool when autograd drops the saved tensors, in any thread, and not before: a graph may be run again.

[Note: changes in place]
The copy on the host has the values from when the next unit began. Autograd would refuse a tensor that was changed after
it was saved, so versions are compared once more when the device memory is released; later changes cannot reach the
copy.

[Note: the memory of saved tensors]
`Meter` counts what saved tensors take on the device, and `HostPool` has the memory that they borrow on the host. Memory
is counted once, however many tensors share it. Weights and buffers do not count, as they would be there anyway.
Counting costs the host some microseconds for each saved tensor, so under `"auto"` only steps that are measured do it.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
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


MIN_OFFLOAD_BYTES = 4 << 10  # smaller storages stay on the device
# a tensor that is a smaller part of its memory does not take all of it along: a batch of a data set on the device, say
_WASTE = 64

_Leftover: TypeAlias = tuple[HostBuffer, Tensor | None, Ticket | None]
"""Memory that an activation no longer needs, and a copy into or out of it that nothing has waited for yet."""


class Stage(enum.Enum):
    """How far an activation is on its way to the host and back; only `Activation` changes it."""

    DEVICE = enum.auto()
    """It is on the device, where it was computed."""
    LEAVING = enum.auto()
    """It is on the device, and the copy to the host was started."""
    HOST = enum.auto()
    """It is on the host only."""
    BACK = enum.auto()
    """The copy to the device was started; `unpack` makes computing wait for its ticket."""


class Activation:
    """A storage that autograd saved tensors of."""

    def __init__(self, tensor: Tensor, unit: str, charge: Charge | None, leftovers: deque[_Leftover]) -> None:
        self.unit = unit  # name of the unit that saved it first
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version  # version of the tensor when it was saved
        self.stage = Stage.DEVICE
        # a tensor in its memory: the first one that was saved, without the node that saves it, or one that came back
        self.device: Tensor | None = tensor.detach()
        self.charge = charge  # for the memory on the device
        self.host: HostBuffer | None = None  # the copy on the host
        self.ticket: Ticket | None = None  # a copy that nothing has waited for yet
        # no other storage gets the same identity while this reference lives
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._leftovers = leftovers
        self._was_changed = False

    @property
    def is_changed(self) -> bool:
        """Whether it was written to after it was saved, and before it was released; see [Note: changes in place]."""
        if self.stage in (Stage.DEVICE, Stage.LEAVING):
            assert self.device is not None
            return self.device._version != self.version
        return self._was_changed

    def leave(self, host: HostBuffer, ticket: Ticket) -> None:
        """Note that a copy to the host was started."""
        assert self.stage is Stage.DEVICE
        self.stage = Stage.LEAVING
        self.host = host
        self.ticket = ticket

    def release(self) -> None:
        """Release the memory that it was computed in, now that the host has a copy."""
        assert self.stage is Stage.LEAVING
        self._was_changed = self.is_changed
        self.stage = Stage.HOST
        self.device = None
        self.charge = None
        self.ticket = None

    def stay(self) -> None:
        """Stay on the device, as the copy to the host may have failed."""
        assert self.stage is Stage.LEAVING
        self.stage = Stage.DEVICE
        self.host = None
        self.ticket = None

    def come_back(self, device: Tensor, charge: Charge | None, ticket: Ticket) -> None:
        """Note that a copy to this device memory was started."""
        assert self.stage is Stage.HOST
        self.stage = Stage.BACK
        self.device = device
        self.charge = charge
        self.ticket = ticket

    def __del__(self) -> None:
        if self.host is not None:  # autograd may free it in any thread: only leave a note
            device = None if self.ticket is None else self.device
            self._leftovers.append((self.host, device, self.ticket))


class Offloaded(NamedTuple):
    """A stand-in that autograd holds for an offloaded tensor: its layout in its memory, wherever that is."""

    activation: Activation
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def is_changed(self) -> bool:
        """Whether it was written to in place, in the time in which that matters."""
        return self.activation.is_changed


@dataclass(eq=False)
class Bundle:
    """Activations that were saved in one call of a unit's member.

    A bundle exists even if its activations stay on the device, because it tells what backward needs next.
    """

    unit: str  # the unit's name
    leaves: bool  # whether the activations are to be offloaded
    before: Bundle | None = None  # the bundle that was completed before; backward needs it next
    # activations in order, once for each tensor in them
    saved: list[ref[Activation]] = field(default_factory=list)

    def alive(self) -> list[Activation]:
        """Return the activations that autograd has not dropped yet."""
        activations = dict.fromkeys(reference() for reference in self.saved)
        return [activation for activation in activations if activation is not None]


class Offloader:
    """Sends saved activations to the host and fetches them for backward."""

    def __init__(self, backend: Backend, meter: Meter, stats: Stats) -> None:
        self.pool = HostPool(backend, stats)
        self._backend = backend
        self._meter = meter
        self._stats = stats
        self._by_memory: WeakValueDictionary[int, Activation] = WeakValueDictionary()
        # bundles of calls under way, innermost last; None for calls without a graph
        self.open: list[Bundle | None] = []
        self._leaving: list[Activation] = []  # activations whose copies may still read them
        self._leftovers: deque[_Leftover] = deque()

    def send(self, bundle: Bundle) -> None:
        """Start copying a bundle's activations to the host."""
        for activation in bundle.alive():
            if activation.stage is not Stage.DEVICE:
                continue
            assert activation.device is not None
            storage = activation.device.untyped_storage()
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = self.pool.take(activation.nbytes)
            target = host.bytes[: activation.nbytes]
            ticket = self._backend.trace.download(Kind.OFFLOAD, bundle.unit, target, source)
            activation.leave(host, ticket)
            self._leaving.append(activation)
            self._stats.bytes_to_host += activation.nbytes
            self._stats.offloaded_bytes += activation.nbytes

    def release_sent(self) -> None:
        """Free the device memory of activations that were sent, and host memory that autograd has dropped.

        Computing, not the host, waits for copies.
        """
        for activation in self._leaving:
            self._wait(activation)
            activation.release()
        self._leaving.clear()
        self._reclaim_host_memory(landed=False)

    def pack(self, tensor: Tensor) -> Offloaded | None:
        """Take a tensor that autograd saves in a call; return None if it is not to be offloaded, or has to stay."""
        bundle = self.open[-1]
        if bundle is None or not bundle.leaves or not self._may_leave(tensor):
            return None
        memory_key = storage_key(tensor)
        activation = self._by_memory.get(memory_key)
        if activation is None or activation.version != tensor._version:
            self._backend.check_stream(f"A tensor that {bundle.unit!r} saves")
            charge = self._meter.hold(tensor)
            activation = Activation(tensor, bundle.unit, charge, self._leftovers)
            self._by_memory[memory_key] = activation
        bundle.saved.append(ref(activation))
        return Offloaded(activation, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _may_leave(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory is plain, on the device, large, needed, and not there for good."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._backend.device
            and storage_key(tensor) not in self._meter.uncounted
            and not (tensor.is_leaf and tensor.requires_grad)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
            and MIN_OFFLOAD_BYTES <= tensor.untyped_storage().nbytes() <= _WASTE * tensor.nbytes
            and tensor.data_ptr() != 0  # empty, or zeros without memory, as in forward-mode AD
        )

    def unpack(self, packed: Offloaded) -> Tensor:
        """Return the saved tensor, for backward."""
        activation = packed.activation
        if activation.stage is Stage.HOST:
            self._stats.activation_misses += 1
            self._fetch(activation)
        if activation.stage is Stage.BACK and activation.ticket is not None:
            self._wait(activation)
            activation.ticket = None
        assert activation.device is not None
        storage = activation.device.untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return empty.set_(storage, packed.offset, packed.size, packed.stride)

    def _wait(self, activation: Activation) -> None:
        """Have computing wait for an activation's copy."""
        assert activation.ticket is not None
        self._backend.trace.wait(activation.ticket, "activations")

    def reach(self, bundle: Bundle) -> None:
        """Fetch the activations that backward needs now, for the nodes of a call, and those that it will need next."""
        self.release_sent()
        for needed in (bundle, bundle.before):
            if needed is None:
                continue
            for activation in reversed(needed.alive()):  # backward uses the last ones first
                if activation.stage is Stage.HOST:
                    self._fetch(activation)

    def _fetch(self, activation: Activation) -> None:
        assert activation.host is not None
        device = self._backend.allocate(activation.nbytes)
        source = activation.host.bytes[: activation.nbytes]
        ticket = self._backend.trace.upload(Kind.FETCH, activation.unit, device, source)
        activation.come_back(device, self._meter.hold(device), ticket)
        self._stats.bytes_to_device += activation.nbytes
        self._stats.fetched_bytes += activation.nbytes

    def _reclaim_host_memory(self, landed: bool) -> None:
        """Return host memory that autograd has dropped to the pool; all copies may be known to have landed."""
        while self._leftovers:
            host, _, ticket = self._leftovers.popleft()
            if ticket is not None and not landed:
                self._backend.wait(ticket)
            self.pool.give_back(host)

    def abandon(self) -> None:
        """Return to idle after an exception, when no copy is under way: no call is open, nothing leaves or comes.

        A copy may have failed, so activations that were leaving stay on the device.
        """
        self.open.clear()
        for activation in self._leaving:
            if activation.stage is Stage.LEAVING and activation.host is not None:
                self.pool.give_back(activation.host)
                activation.stay()
        self._leaving.clear()
        self._reclaim_host_memory(landed=True)

    def close(self) -> None:
        """Release all host memory."""
        self.abandon()
        self.pool.close()
