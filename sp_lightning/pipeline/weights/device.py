"""Device memory: one arena that streamed groups share, and memory of their own for resident ones.

[Note: places in the arena]
A group has the same place for as long as the arrangement lives, so raw aliases of its weights (a tensor stashed on an
autograd `ctx`, one held by a checkpoint) are right from its load to the end of its backward. Places are chosen so
that any `window` groups that follow each other do not overlap; with equal sizes this is "group g has slot g mod k",
with unequal sizes a large embedding does not inflate every slot. Groups whose places overlap cannot be on the
device at once: to load one is to evict the others. Evicting moves nothing, because the host has the truth.

A unit that is kept (`WindowPlan.resident`) travels alone to a place of its own outside of the arena. It is loaded when
its weights have changed, in the order of use like all others, and never evicted.

    12 blocks, k = 3      slot 0   slot 1   slot 2
    forward of block 4      3        4        5      <- 5 arrives while 4 computes
    forward of block 5      6        4        5      <- 3 is done: its slot takes 6
    ...
    backward of block 11    9       10       11      <- the last three stay for the turn
    backward of block 10    9       10        8
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from torch import Tensor

from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights.host import GroupHost, MasterState


class Residency(enum.Enum):
    """Whether a group's bytes are on the device."""

    ABSENT = enum.auto()
    """Its place holds nothing, or another group's bytes."""
    COMING = enum.auto()
    """The copy to the device has been started; computing must wait for its ticket."""
    READABLE = enum.auto()
    """Computing waits for the copy, so that what is computed from now on sees the bytes."""


class Group:
    """Units that travel together (`k_prime` of them), or resident weights, which travel and then stay.

    Attributes:
        index: Number of the group among the streamed ones, in expected order.
        host: Where the bytes come from.
        place: Where they go.
        resident: Whether the place is never given away.
        name: What to call it: the names of its units.
        kept: Whether the place is its own, so that it is only loaded when its masters have changed.
        conflicts: Groups whose place overlaps this one's.
        users: Forward calls that are inside one of its units now; above zero it may not be evicted.
        residency: Whether its bytes are on the device.
        ticket: The last copy to the device.
        suspect: Whether the masters may have changed since the load.
        last_load: In which step it was loaded last, and the masters' versions then.
        handles: How many nodes of graphs hold one of its weights for their backward.
        being_stepped: The work of an optimizer on its masters; None if there is none, or it has been seen to be done.
        state: The masters as they were last looked at; None if they may have changed since.
    """

    def __init__(
        self, index: int, units: int, host: GroupHost, *, resident: bool, kept: bool = False, name: str = ""
    ) -> None:
        self.index = index
        self.units = units
        self.host = host
        self.resident = resident
        self.name = name
        self.place: Tensor
        self.kept = resident or kept
        self.conflicts: list[Group] = []
        self.users = 0
        self.residency = Residency.ABSENT
        self.ticket: Ticket | None = None
        self.suspect = False
        self.state: MasterState | None = None
        self.last_load: tuple[int, tuple[int, ...] | None] | None = None
        self.handles = 0
        self.being_stepped: Ticket | None = None

    @property
    def loaded(self) -> bool:
        """Whether its bytes are on the device or on their way."""
        return self.residency is not Residency.ABSENT

    @property
    def readable(self) -> bool:
        """Whether what is computed from now on sees its bytes."""
        return self.residency is Residency.READABLE

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the device."""
        return self.host.source.bytes.nbytes


def travel_together(units: int, k_prime: int, alone: Collection[int] = ()) -> list[list[int]]:
    """Which units travel together: up to `k_prime` neighbours, whose gradients come one after the other.

    Args:
        units: How many units there are.
        k_prime: How many travel together.
        alone: Numbers of units that do not travel with others.
    """
    parts: list[list[int]] = []
    for unit in range(units):
        full = not parts or len(parts[-1]) == k_prime or parts[-1][-1] in alone
        if full or unit in alone:
            parts.append([])
        parts[-1].append(unit)
    return parts


def place_in_arena(sizes: Sequence[int], window: int) -> tuple[list[int], int]:
    """Offsets such that any `window` consecutive pieces do not overlap, and the bytes in all.

    Args:
        sizes: Bytes of the pieces, in the order in which they are used.
        window: How many neighbours must fit together, the piece itself included.

    Returns:
        Offsets, and the size of the arena: never more than `window` times the largest piece.
    """
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        neighbours = range(max(0, index - window + 1), index)
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in neighbours)
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets.append(offset)
    arena = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
    slot = max(sizes, default=0)
    if arena > window * slot:  # unlucky sizes can leave holes; equal slots never do
        return [index % window * slot for index in range(len(sizes))], window * slot
    return offsets, arena


def overlaps(offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """For each piece of an arena the numbers of the others that have a part of its place."""
    places = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    return [
        [other for other, (begin, end) in enumerate(places) if other != number and begin < last and first < end]
        for number, (first, last) in enumerate(places)
    ]
