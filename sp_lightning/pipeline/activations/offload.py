"""Saved activations that wait on the host: out as their unit leaves, back one unit ahead of backward.

[Note: an activation's way]
What autograd saves while a unit's forward runs is noted, and nothing more. When the unit leaves, each piece of memory
among it is copied to the host once, however many views of it were saved (q, k and v of one projection). Its device
memory is held until the next unit leaves: then computing waits for the copy, so whoever gets that memory next writes
to it after the copy has read it. Backward fetches the activations of the unit before the one that it reaches, and
autograd frees them node by node, as it frees all that it saved. The last units before backward keep theirs: they are
needed at once. So about two units' activations are on the device at any time, in forward as in backward.

    forward of unit   3              4              5              the turn
      3's activations are saved      leave          are on the host
      4's                            are saved      leave
    backward of unit  5              4              3
      3's                            come back      are used, freed

Memory is known by its storage, and held weakly beyond its stay on the device. What lies on the host goes back to the
pool when autograd drops what it saved, in whichever thread that happens, and not before: a graph may be run again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from sp_lightning.pipeline._private import in_backward, storage_key
from sp_lightning.pipeline.activations.memory import Activation, Offloaded, Returned, Stage, extent
from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.trace import Kind
from sp_lightning.pipeline.weights.units import Member, Unit

SMALLEST = 4 << 10  # bytes; whatever is smaller stays
_NEGLIGIBLE = 100  # the smallest tensors stay as long as they are not this part of their unit's: copies cost the host
STAYING = 2  # units before the turn whose activations stay: as many as are on the device at any other time


class Bundle:
    """What was saved in calls of one unit that followed each other.

    Attributes:
        unit: The unit.
        leaves: Whether it waits on the host. What stays is here all the same, to tell what comes next in backward.
        members: Which of its members were called.
        before: The bundle that was complete before this one: the next one that backward needs.
        around: Bundles of calls that were around these.
    """

    def __init__(self, member: Member, leaves: bool, around: Iterable[Bundle]) -> None:
        self.unit: Unit | None = member.unit
        self.leaves = leaves
        self.members = {member}
        self.before: Bundle | None = None
        self.around = tuple(around)
        self._activations: dict[int, ref[Activation]] = {}

    def add(self, activation: Activation) -> None:
        """Note that a call of the unit saved it."""
        activation.unit = activation.unit or self.name
        self._activations[id(activation)] = ref(activation)

    @property
    def name(self) -> str:
        """The unit's."""
        return "" if self.unit is None else self.unit.name

    def waiting(self) -> list[Activation]:
        """What autograd has not dropped yet."""
        return [activation for found in self._activations.values() if (activation := found()) is not None]


class _Leaving(NamedTuple):
    """A copy to the host on its way, and the memory that it reads."""

    bundle: Bundle
    activation: Activation
    source: Tensor


class Offloader:
    """Sends saved activations to the host and brings them back.

    Args:
        backend: Allocates and copies.
        pool: Lends host memory.
        meter: Counts what is on the device; knows what stays there in any case.
        stats: Counters.
    """

    def __init__(self, backend: Backend, pool: HostPool, meter: Meter, stats: Stats) -> None:
        self._backend = backend
        self._pool = pool
        self._meter = meter
        self._stats = stats
        self._lock = threading.RLock()  # backward of a CUDA graph runs in a thread of autograd's
        self._by_memory: WeakValueDictionary[int, Activation] = WeakValueDictionary()
        self._open: list[Bundle | None] = []
        self._last: Bundle | None = None
        self._staying: deque[Bundle] = deque()
        self._leaving: list[_Leaving] = []
        self._back: list[ref[Activation]] = []
        self._returned: deque[Returned] = deque()
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ forward

    def begin(self) -> None:
        """A new step: what it builds has nothing to do with what was built before."""
        self._last = None

    @property
    def current(self) -> Bundle | None:
        """What the call that was entered last saves; None in backward, and without a graph."""
        return self._open[-1] if self._open else None

    def enter(self, member: Member, leaves: bool) -> None:
        """A call of a unit begins.

        Args:
            member: What is called.
            leaves: Whether what it saves is to wait on the host.
        """
        with self._lock:
            is_forward = torch.is_grad_enabled() and not in_backward()  # a recomputation is used at once
            self._open.append(self._bundle_for(member, leaves) if is_forward else None)

    def _bundle_for(self, member: Member, leaves: bool) -> Bundle:
        last = self._last
        if last is not None and (last.unit, last.leaves) == (member.unit, leaves) and member not in last.members:
            last.members.add(member)
            return last
        return Bundle(member, leaves, [bundle for bundle in self._open if bundle is not None])

    def leave(self, ahead: Callable[[], int]) -> None:
        """The call that was entered last ends.

        Args:
            ahead: Tells how many other units forward is expected to use before backward begins.
        """
        with self._lock:
            bundle = self._open.pop() if self._open else None  # none is open after a reset
            if bundle is None:
                return
            if bundle is not self._last:
                bundle.before, self._last = self._last, bundle
            self._let_go_of_all_but(bundle)
            self._take_back()
            if bundle.leaves and bundle not in self._staying:
                self._staying.append(bundle)
            may_stay = max(0, STAYING - ahead())
            while len(self._staying) > may_stay:
                self._send(self._staying.popleft())

    def _send(self, bundle: Bundle) -> None:
        """Start the copies of what a unit saved."""
        here = [a for a in bundle.waiting() if a.stage is Stage.DEVICE and a.is_worth_a_copy()]
        negligible = _smallest(here, sum(activation.held for activation in here) // _NEGLIGIBLE)
        for activation in [activation for activation in here if activation not in negligible]:
            activation.host = self._pool.take(activation.nbytes)
            source = activation.source()
            activation.ticket = self._backend.download(activation.host.bytes, source)
            self._backend.trace.moved(Kind.OFFLOAD, bundle.name, activation.nbytes, activation.ticket)
            activation.stage = Stage.LEAVING
            self._leaving.append(_Leaving(bundle, activation, source))
            self._stats.bytes_to_host += activation.nbytes
            self._stats.offloaded_bytes += activation.nbytes

    def _let_go_of_all_but(self, bundle: Bundle | None) -> None:
        """Free the device memory of what was sent; computing waits for the copies out of it, the host does not."""
        for leaving in self._leaving:
            if leaving.bundle is not bundle and leaving.activation.stage is Stage.LEAVING:
                assert leaving.activation.ticket is not None
                self._backend.trace.wait(leaving.activation.ticket, "activations")
                leaving.activation.let_go()
        self._leaving = [leaving for leaving in self._leaving if leaving.activation.stage is Stage.LEAVING]

    def _call_off(self, activation: Activation) -> None:
        """Backward came earlier than expected: what is leaving stays."""
        assert activation.host is not None
        self._returned.append(Returned(activation.host, None, activation.ticket))
        activation.stage, activation.host, activation.ticket = Stage.DEVICE, None, None

    # ------------------------------------------------------------------------------------------------ saved tensors

    def pack(self, tensor: Tensor) -> Offloaded | None:
        """Take a tensor that autograd saves; None if it is not for us, or has to stay."""
        bundle = self.current
        if bundle is None or not bundle.leaves:
            return None
        key = self._memory_that_may_leave(tensor)
        if key == 0:
            return None
        start, end = extent(tensor)
        with self._lock:
            activation = self._by_memory.get(key)
            if activation is None or not activation.can_hold(tensor, start, end):
                activation = self._by_memory[key] = Activation(tensor, start, end, self._meter, self._returned)
            bundle.add(activation)
            return Offloaded(activation, activation.add(tensor))

    def _memory_that_may_leave(self, tensor: Tensor) -> int:
        """The identity of a tensor's memory if that is plain, on the device, large, and nobody's for good; else 0."""
        key = storage_key(tensor) if type(tensor) is Tensor and tensor.layout is torch.strided else 0
        may_leave = (
            key not in self._meter.uncounted
            and key != 0
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and tensor.device == self._backend.device
            and not (tensor.is_leaf and tensor.requires_grad)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
            and tensor.data_ptr() != 0  # empty, or zeros without memory, as forward-mode differentiation has them
        )
        return key if may_leave else 0

    def unpack(self, packed: Offloaded) -> Tensor:
        """The tensor again, for backward."""
        activation, view = packed
        with self._lock:
            if view.tensor is not None:
                return view.tensor
            if activation.stage is Stage.HOST:
                self._stats.activation_misses += 1
                self._fetch(activation)
            if activation.ticket is not None:
                self._backend.trace.wait(activation.ticket, "activations")
                activation.ticket = None
            assert activation.device is not None
            return view.made_of(activation.device, activation.start)

    # ----------------------------------------------------------------------------------------------------- backward

    def reach(self, bundle: Bundle) -> None:
        """Backward is about to run the nodes of a call: what it needs is on its way, and what comes next as well."""
        with self._lock:
            # what was saved last is used first
            wanted = [*reversed(bundle.waiting()), *reversed(bundle.before.waiting() if bundle.before else [])]
            needed = {*wanted, *(activation for other in bundle.around for activation in other.waiting())}
            for activation in needed:
                if activation.stage is Stage.LEAVING:
                    self._call_off(activation)
            self._let_go_of_all_but(None)
            self._drop_all_but(needed)
            self._take_back()
            for activation in wanted:
                if activation.stage is Stage.HOST:
                    self._fetch(activation)

    def end_backward(self) -> None:
        """Backward has ended: what a retained graph still holds waits on the host for the next one."""
        with self._lock:
            self._drop_all_but(set())
            self._take_back()

    def _fetch(self, activation: Activation) -> None:
        if self._closed:
            raise RuntimeError(
                "backward needs activations that superpipeline had on the host, and it has been detached since. Call "
                "backward before `detach()`."
            )
        assert activation.host is not None
        device = self._backend.allocate(activation.nbytes)
        ticket = self._backend.upload(device, activation.host.bytes)
        activation.come_back(device, ticket)
        self._backend.trace.moved(Kind.FETCH, activation.unit, activation.nbytes, ticket)
        self._back.append(ref(activation))
        self._stats.bytes_to_device += activation.nbytes
        self._stats.fetched_bytes += activation.nbytes

    def _drop_all_but(self, needed: set[Activation], landed: bool = False) -> None:
        """Backward is past these units: if a graph is retained, they go back to being on the host alone."""
        back = [activation for found in self._back if (activation := found()) is not None]
        self._back = [ref(activation) for activation in back if activation in needed]
        for activation in back:
            if activation not in needed:
                if activation.ticket is not None and not landed:
                    self._backend.wait(activation.ticket)
                activation.go_again()

    def _take_back(self, landed: bool = False) -> None:
        """Host memory of what autograd has dropped meanwhile."""
        while self._returned:
            returned = self._returned.popleft()
            if returned.ticket is not None and not landed:
                self._backend.wait(returned.ticket)
            self._pool.give_back(returned.host)

    # ------------------------------------------------------------------------------------------------------ endings

    def reset(self) -> None:
        """After an exception, when no copy is on its way any more: no call is open, nothing leaves or comes.

        A copy may have failed, so what was leaving stays, and what was coming is where it came from.
        """
        with self._lock:
            self._open.clear()
            self._staying.clear()
            self._last = None
            for leaving in self._leaving:
                if leaving.activation.stage is Stage.LEAVING:
                    self._call_off(leaving.activation)
            self._leaving.clear()
            self._drop_all_but(set(), landed=True)
            self._take_back(landed=True)

    def close(self) -> None:
        """Give host memory back."""
        with self._lock:
            self.reset()
            self._closed = True
            self._pool.close()


def _smallest(activations: Iterable[Activation], nbytes: int) -> set[Activation]:
    """The smallest ones that together hold no more than this."""
    found = set()
    for activation in sorted(activations, key=lambda activation: activation.held):
        nbytes -= activation.held
        if nbytes < 0:
            break
        found.add(activation)
    return found
