"""Groups: units that travel together, and what of them is on the device."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

NOTHING = -1  # no epoch


class Residency(enum.Enum):
    """Whether a group's bytes are on the device."""

    ABSENT = enum.auto()
    """Its place holds nothing, or another group's bytes, or some that are out of date."""
    COMING = enum.auto()
    """Copies to the device have been asked for; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


class Group:
    """Units that travel together (up to `k_prime`), or resident weights, which stay once they are on the device.

    Attributes:
        index: Its number among the streamed groups, in expected order.
        units: The units; none for a weight that was made resident.
        unit_count: How many units travel in it.
        segments: The host memory that it is copied from.
        weights: The weights, in the order in which they lie in its place.
        offsets: Where each weight begins in its place.
        nbytes: Bytes it takes on the device.
        place: The device memory that it is copied to.
        resident: Whether it holds resident weights.
        name: The names of its units, for recordings.
        has_own_place: Whether it has a place of its own, so that it is loaded only when its masters have changed.
        conflicts: Groups whose places overlap its own.
        users: Forward calls that are inside one of its units now; while there are any, it may not be evicted.
        residency: Whether its bytes are on the device.
        lying: For each segment, its epoch when what lies in its place was sent.
        uploads: Copies to the device, which may still be under way.
        suspect: Whether its masters may have changed since they were last checked.
        handles: How many saved tensors of live graphs are its weights, or views of them.
        being_stepped: An optimizer's work on its masters; None if there is none, or once it is known to be done.
        apart: Groups of single weights of it, which were made resident.
    """

    place: Tensor

    def __init__(
        self,
        index: int,
        units: Sequence[Unit],
        segments: Sequence[Segment],
        *,
        resident: bool,
        has_own_place: bool = False,
        name: str = "",
    ) -> None:
        self.index = index
        self.units = list(units)
        self.unit_count = len(units)
        self.segments = list(segments)
        self.weights: list[Weight] = [weight for segment in segments for weight in segment.weights]
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.nbytes = 0
        for segment in segments:
            self.starts.append(self.nbytes)
            self.offsets += [self.nbytes + offset for offset in segment.offsets]
            self.nbytes += segment.nbytes
        self.resident = resident
        self.name = name
        self.has_own_place = resident or has_own_place
        self.conflicts: frozenset[Group] = frozenset()
        self.users = 0
        self.residency = Residency.ABSENT
        self.lying = [NOTHING] * len(segments)
        self.uploads: list[Ticket] = []
        self.suspect = False
        self.handles = 0
        self.being_stepped: Ticket | None = None
        self.apart: list[Group] = []

    @property
    def loaded(self) -> bool:
        """Whether its bytes are on the device or on their way."""
        return self.residency is not Residency.ABSENT

    @property
    def readable(self) -> bool:
        """Whether everything computed from now on sees its bytes."""
        return self.residency is Residency.READABLE

    def finish_step(self, stats: Stats) -> None:
        """Wait until the optimizer is done with the masters.

        Raises:
            Exception: Whatever the optimizer's step raised.
        """
        work = self.being_stepped
        if work is None:
            return
        stats.optimizer_waits += not work.done
        try:
            work.join()
        finally:
            if work.done:  # not if an interrupt has ended the wait
                self.being_stepped = None

    def is_outdated(self) -> bool:
        """Tell whether masters have changed since what lies in its place was sent."""
        return any(segment.epoch != epoch for segment, epoch in zip(self.segments, self.lying, strict=True))

    def place_of(self, segment_number: int, begin: int, nbytes: int) -> Tensor:
        """Return the part of its place that bytes of a segment go to."""
        start = self.starts[segment_number] + begin
        return self.place if nbytes == self.nbytes else self.place[start : start + nbytes]

    def clear_place(self) -> None:
        """Note that its place holds nothing of it any more."""
        self.lying = [NOTHING] * len(self.segments)

    def copies(self) -> list[Tensor | None]:
        """Return, for each weight, the copy that is sent, to write to; None where the master itself is sent."""
        return [copy for segment in self.segments for copy in segment.copies]

    def refresh_other_copies(self, stepped: Collection[Weight]) -> None:
        """Bring copies up to date, if they are not, of weights that are not stepped in the step under way."""
        for segment in self.segments:
            segment.refresh_other_copies(stepped)

    def note_stepped(self) -> None:
        """Note that masters, and the copies that are sent, are as an optimizer's step has left them."""
        for segment in self.segments:
            segment.note_stepped()

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for its weights, without gradients."""
        return sum(segment.host_bytes() for segment in self.segments)

    def release_copies(self) -> None:
        """Let go of the copies that are sent."""
        for segment in self.segments:
            segment.release_copies()
