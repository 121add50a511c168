"""The host side of a group: its masters, what is sent of them, and whether they have changed.

A group goes to the device in one copy, so everything that it sends must lie together. Weights that are sent in the
dtype in which they are kept are sent from where their masters lie. Of those that autocast would lower, copies in the
dtype that is sent lie there, written once per change of the masters. A master that others hold has to stay where it is,
apart (master_memory.py): of the weights of its group, copies are sent.

[Note: which weights are copied]
Beside adapters that autocast lowers, a frozen base in bf16 is sent as it is. A copy of it would double the host memory
that the model takes, so only the adapters are copied. Where most bytes are lowered, all weights of the group are copied
instead: otherwise every master would have to move once, when autocast is first seen, for the sake of a few norms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.master_memory import MasterMemory
from sp_lightning.pipeline.weights.rooms import Room, padded
from sp_lightning.pipeline.weights.sections import divide
from sp_lightning.pipeline.weights.weight import Weight

_GAP = 1 << 18  # bytes that are sent once more, rather than in another copy
_MOST_RANGES = 16


class MasterState(NamedTuple):
    """The version counters of masters, and samples of their bytes, one for each room that they lie in.

    `.data.copy_` (EMA, weight averaging, pruning) does not bump the version counter, hence the samples.
    """

    versions: tuple[int, ...]
    samples: tuple[Tensor, ...]


class _Plan(NamedTuple):
    """Masters that are to lie together in memory of so many bytes, from these offsets on."""

    weights: list[Weight]
    offsets: list[int]
    nbytes: int


class _Plans:
    """Where the masters of a group are to lie, and of which weights copies are sent.

    Args:
        weights: The weights, in the order in which they are sent.
        memory: What masters already lie in.

    Attributes:
        copied: The weights of which copies are sent.
        rooms: A plan for each room. If masters are sent themselves, the first one is that of what is sent.
        found: For each room, the memory in which masters already lie like this.
        are_apart: Whether each master has a room of its own, as others hold one of them.
        source_offsets: Where each weight begins in what is sent.
        sent_bytes: How many bytes are sent.
    """

    def __init__(self, weights: Sequence[Weight], memory: MasterMemory) -> None:
        self.source_offsets, self.sent_bytes = lay_out([weight.compute_bytes for weight in weights])
        self.copied = _copied(weights)
        self.rooms = self._together(weights)
        self.found = [memory.find(*plan) for plan in self.rooms]
        held = {} if all(self.found) else memory.held_by_others(weights)
        self.are_apart = bool(held)
        if held:
            self.copied = set(weights)
            self.rooms = [_Plan([weight], [0], padded(weight)) for weight in weights]
            self.found = [held.get(weight) for weight in weights]

    def _together(self, weights: Sequence[Weight]) -> list[_Plan]:
        sent = [pair for pair in zip(weights, self.source_offsets, strict=True) if pair[0] not in self.copied]
        apart = [weight for weight in weights if weight in self.copied]
        rooms = [_Plan([weight for weight, _ in sent], [offset for _, offset in sent], self.sent_bytes)]
        rooms.append(_Plan(apart, *lay_out([weight.nbytes for weight in apart])))
        return [room for room in rooms if room.weights]


class GroupHost:
    """The host side of a group.

    Args:
        weights: The weights, in the order in which they are sent.
        backend: Pins the memory.
        pin: Whether to pin the memory that is sent.
        memory: What masters already lie in.

    Attributes:
        rooms: The memory that masters lie in.
        sends_copies: Whether copies of some masters are sent instead of the masters themselves.
        source: The memory that is sent.
        source_offsets: Where each weight begins in it, in bytes.
        sections: The sections of the memory that is sent.
    """

    def __init__(
        self, weights: Sequence[Weight], backend: Backend, pin: bool, memory: MasterMemory | None = None
    ) -> None:
        self.weights = list(weights)
        self._backend = backend
        plans = _Plans(self.weights, MasterMemory() if memory is None else memory)
        self.sends_copies = bool(plans.copied)
        buffers = [
            found or HostBuffer(plan.nbytes, backend, pin=False)
            for plan, found in zip(plans.rooms, plans.found, strict=True)
        ]
        self.source = buffers[0] if len(plans.copied) < len(weights) else HostBuffer(plans.sent_bytes, backend, pin)
        self.source_offsets = plans.source_offsets
        self.rooms = [
            Room(plan.weights, plan.offsets, buffer) for plan, buffer in zip(plans.rooms, buffers, strict=True)
        ]
        for buffer in buffers:
            if buffer is not self.source:
                buffer.unpin()
            elif pin:
                buffer.pin()
        self._copies = [
            tensor_in(self.source.bytes, offset, weight.layout, weight.compute_dtype)
            if weight in plans.copied
            else None
            for weight, offset in zip(self.weights, self.source_offsets, strict=True)
        ]
        dtypes = [weight.compute_dtype for weight in self.weights]
        layouts = [weight.layout for weight in self.weights]
        self.sections = divide(layouts, self.source_offsets, dtypes, self.source.nbytes)
        self._copied_state: MasterState | None = None  # of the masters when copies were made of them

    def state(self) -> MasterState:
        """Return the masters' present state."""
        self.readopt()
        return self._state_as_it_is()

    def _state_as_it_is(self) -> MasterState:
        """Return the state of masters that may be being stepped, so that nothing is moved back into our memory."""
        with torch.inference_mode(False):
            return MasterState(self._counts(), tuple(room.sample() for room in self.rooms))

    def changed_ranges(
        self, since: MasterState, now: MasterState | None, stepped: Collection[Weight]
    ) -> list[tuple[int, int]]:
        """Return which bytes of what is sent have changed.

        Args:
            since: An earlier state.
            now: The present state; None if some masters are being stepped.
            stepped: The masters that have been stepped since, or still are.
        """
        everything = [(0, self.source.nbytes)]
        if any(weight.is_elsewhere for weight in self.weights):
            return everything
        ranges = self._ranges_of({*stepped, *self._differing(since, now or self._state_as_it_is())})
        is_little = is_little_of(sum(end - begin for begin, end in ranges), self.source.nbytes)
        return ranges if is_little and len(ranges) <= _MOST_RANGES else everything

    def are_little(self, weights: Iterable[Weight]) -> bool:
        """Tell whether these weights are so little of what is sent that they are worth copies of their own."""
        return is_little_of(sum(weight.compute_bytes for weight in weights), self.source.nbytes)

    def _differing(self, since: MasterState, now: MasterState) -> Iterator[Weight]:
        """Yield the weights that two states differ in."""
        counted = zip(self.weights, since.versions, now.versions, strict=True)
        yield from (weight for weight, before, after in counted if before != after)
        for room, before, after in zip(self.rooms, since.samples, now.samples, strict=True):
            yield from room.differing(before, after)

    def _ranges_of(self, weights: Collection[Weight]) -> list[tuple[int, int]]:
        """Return where weights lie in what is sent, joined where there is little between them."""
        ranges: list[tuple[int, int]] = []
        ends = [*self.source_offsets[1:], self.source.nbytes]
        for weight, begin, end in zip(self.weights, self.source_offsets, ends, strict=True):
            if weight in weights:
                if ranges and begin - ranges[-1][1] <= _GAP:
                    begin, _ = ranges.pop()
                ranges.append((begin, end))
        return ranges

    def has_changed(self, since: MasterState) -> bool:
        """Tell whether masters have been written to since they were in this state."""
        if self._versions() != since.versions:
            return True
        with torch.inference_mode(False):
            rooms = zip(self.rooms, since.samples, strict=True)
            return not all(torch.equal(room.sample(), sample) for room, sample in rooms)

    def prepare(self, state: MasterState) -> Tensor:
        """Bring copies up to date, and return the bytes to send.

        Args:
            state: The masters' present state.
        """
        if self.sends_copies and self._copied_state is not state:
            self.refresh_copies(stepped=())
            self._copied_state = state
        return self.source.bytes

    def copies(self) -> Sequence[Tensor | None]:
        """Return, for each weight, the copy that is sent, to write to; None where the master itself is sent."""
        return self._copies

    def copies_match(self, state: MasterState | None) -> bool:
        """Tell whether the copies were made of masters in this state, and the masters still are in it."""
        if not self.sends_copies or state is None:
            return False
        return self._copied_state is state and not self.has_changed(state)

    def refresh_copies(self, stepped: Collection[Weight]) -> None:
        """Bring the copies up to date, except those of weights that are being stepped."""
        for weight, copy in zip(self.weights, self._copies, strict=True):
            if copy is not None and weight not in stepped:
                copy.copy_(weight.host)

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
        """Return these counts, once masters that were given other memory lie in ours again."""
        self.readopt()
        return self._counts()

    def _counts(self) -> tuple[int, ...]:
        """Return a number for each master that grows with every change that torch counts, and when it is replaced."""
        return tuple(weight.version + weight.replacements for weight in self.weights)

    def piece_of(self, weight: Weight) -> HostBuffer:
        """Return the memory of one of the masters, with the padding after it, as a buffer that is not pinned itself."""
        room = next(room for room in self.rooms if weight in room.weights)
        return room.piece_of(weight, self._backend)

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for these weights, without gradients."""
        masters = sum(room.memory.nbytes for room in self.rooms)
        return masters + (self.source.nbytes if self._sends_only_copies else 0)

    def release(self) -> None:
        """Let go of the memory; that of masters serves the next arrangement, too, for which `MasterMemory` has it."""
        if self._sends_only_copies:
            self.source.release()
        self._copies.clear()
        for room in self.rooms:
            room.release()

    @property
    def _sends_only_copies(self) -> bool:
        return all(room.memory is not self.source for room in self.rooms)


def must_stay_apart(weights: Sequence[Weight], memory: MasterMemory) -> bool:
    """Tell whether masters that are to travel together cannot lie together, as others hold one of them."""
    return _Plans(weights, memory).are_apart


def is_little_of(nbytes: int, everything: int) -> bool:
    """Tell whether sending so many bytes is worth more copies than sending everything."""
    return 2 * nbytes <= everything


def _copied(weights: Sequence[Weight]) -> set[Weight]:
    """Return the weights of which copies are sent; see [Note: which weights are copied]."""
    lowered = {weight for weight in weights if weight.lowered}
    lowered_bytes = sum(weight.nbytes for weight in lowered)
    is_most = 2 * lowered_bytes >= sum(weight.nbytes for weight in weights)
    return set(weights) if lowered and is_most else lowered
