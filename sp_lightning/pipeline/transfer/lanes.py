"""What is on its way to and from a device, and on the host: tickets to wait for it, and moments to time it by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """When a recording began: as the device and as the host tell it."""

    device: Any
    host: float


class Ticket(ABC):
    """One copy on its way, or one piece of work on the host."""

    @abstractmethod
    def join(self) -> None:
        """Block the calling thread until it is done; raises what went wrong in it."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `join` would return at once."""

    def interval(self, origin: Origin) -> tuple[float, float] | None:
        """When it began and ended, in seconds since then; None if nobody knows (see `Lanes.timed`)."""
        return None


class Lanes(ABC):
    """Computing, copying and working on the host, side by side.

    Attributes:
        timed: Whether tickets have to know when they began and ended.
    """

    def __init__(self) -> None:
        self.timed = False

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Make what is computed from now on wait for the copy; the host goes on."""

    def synchronize(self, ticket: Ticket) -> None:
        """Make the host wait for the copy."""
        ticket.join()

    def mark(self) -> Any:
        """This moment on the device: when what was given to it so far has been computed."""
        return perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two moments; the host waits for the second."""
        return float(end - begin)

    def origin(self) -> Origin:
        """This moment, from which a recording counts."""
        return Origin(self.mark(), perf_counter())

    @abstractmethod
    def drain(self) -> None:
        """Block until no copy is on its way and no work is left."""
