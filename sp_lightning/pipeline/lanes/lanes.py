"""Tickets for copies and for work on the host that are under way, and moments to time them by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """The moment at which a recording began, on the device's clock and on the host's."""

    device: Any
    host: float


class Ticket(ABC):
    """A handle to a copy in flight, or to a job on the host."""

    @abstractmethod
    def join(self) -> None:
        """Block the calling thread until the copy or job is done; raise its exception if it failed."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `join` would return at once."""

    def interval(self, origin: Origin) -> tuple[float, float] | None:
        """Return when it began and ended, in seconds since the origin; None if it was not timed (`Lanes.timed`)."""
        return None


class Lanes(ABC):
    """Computing, copies in both directions and work on the host, which run side by side.

    Attributes:
        timed: Whether new tickets have to know when they began and ended.
    """

    def __init__(self) -> None:
        self.timed = False

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Make everything computed from now on wait for the copy; see [Note: ordering of copies] in backend.py."""

    def synchronize(self, ticket: Ticket) -> None:
        """Block the host until the copy is done."""
        ticket.join()

    def mark(self) -> Any:
        """Mark the moment at which the device will have computed all that was given to it so far."""
        return perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks; blocks the host until the second is reached."""
        return float(end - begin)

    def origin(self) -> Origin:
        """Take the present moment as the origin of a recording."""
        return Origin(self.mark(), perf_counter())

    @abstractmethod
    def drain(self) -> None:
        """Block until no copy is in flight and no work is left."""
