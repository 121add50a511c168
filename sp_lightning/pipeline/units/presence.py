"""Where a unit's bytes are: asked for, readable on the device, or gone; and whether they are those of the masters."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.operations import untracked

_NUMBERS_IN_ROW = 1024  # a fingerprint adds up the numbers of each row, and of each column


class Residency(enum.Enum):
    """Whether a unit's bytes are on the device; only `Presence.become` changes it."""

    ABSENT = enum.auto()
    """The unit's place holds nothing, or another unit's bytes, or some that are out of date."""
    COMING = enum.auto()
    """The engine has asked for copies to the device; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


# pairs, as a set would call Python code to hash an enum's members
_TRANSITIONS = (
    (Residency.ABSENT, Residency.COMING),
    (Residency.COMING, Residency.READABLE),
    (Residency.COMING, Residency.ABSENT),
    (Residency.READABLE, Residency.ABSENT),
)


class Presence:
    """The part of a unit that is on the device.

    Attributes:
        place: The device memory that the unit is copied to.
        residency: Whether its bytes are there.
        uploads: The copies to the device, which may still be under way.
        suspect: Whether the masters may have changed since they were last checked.
        fingerprint: A digest of the bytes before the call inside; None unless the engine looks for writes that torch
            does not count.
    """

    place: Tensor

    def __init__(self, unit: str) -> None:
        self.residency = Residency.ABSENT
        self.uploads: list[Ticket] = []
        self.suspect = False
        self.fingerprint: Tensor | None = None
        self._unit = unit

    @property
    def is_valid(self) -> bool:
        """Whether weights on the device have their values, so that no copy is needed."""
        return self.residency is Residency.READABLE and not self.suspect

    def become(self, residency: Residency) -> None:
        """Note that the bytes are asked for, can be read, or are gone."""
        assert (self.residency, residency) in _TRANSITIONS, f"{self._unit}: {self.residency} to {residency}"
        self.residency = residency

    def abandon(self) -> None:
        """Treat the bytes as absent, whatever is there: after an exception, or for another place."""
        self.residency = Residency.ABSENT
        self.suspect = True
        self.uploads.clear()
        self.fingerprint = None

    def set_place(self, place: Tensor) -> None:
        """Have the unit copied to this device memory."""
        assert self.residency is Residency.ABSENT, self._unit
        self.place = place

    def watch(self) -> None:
        """Notice changes of the bytes until `has_changed` is asked."""
        assert self.residency is Residency.READABLE, self._unit
        if self.fingerprint is None and self.place.nbytes:
            self.fingerprint = _fingerprint(self.place)

    def has_changed(self, goes_on: bool) -> bool:
        """Tell whether the bytes have changed while they were watched; watch on if asked."""
        if self.fingerprint is None:
            return False
        before, after = self.fingerprint, _fingerprint(self.place)
        self.fingerprint = after if goes_on else None
        return not torch.equal(before, after)


def _fingerprint(memory: Tensor) -> Tensor:
    """Return sums of memory, as whole numbers, over rows and over columns: changes within a row show in columns."""
    with untracked():
        numbers = memory.view(torch.int32)
        count_in_rows = numbers.numel() // _NUMBERS_IN_ROW * _NUMBERS_IN_ROW
        rows = numbers[:count_in_rows].view(-1, _NUMBERS_IN_ROW)
        return torch.cat([rows.sum(0), rows.sum(1), numbers[count_in_rows:]])
