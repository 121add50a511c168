"""A record of what each lane was busy with, and when; written only on request.

    compute     forward and backward of units, and stalls, in which computing waits for a copy
    to device   weights, and activations that come back; with several processes, sums of gradients to be averaged
    to host     gradients, and activations that leave
    host        optimizer steps of units, and accumulation of gradients

Every backend has a `Trace`. The engine tells it what a copy or a job is for; its ticket is asked after the recording
when it began and ended. Timeline, planner and callback read the result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sp_lightning.pipeline.lanes.lanes import Lanes, Origin, Ticket

_LEAST_STALL = 20e-6  # seconds; less is what asking takes when there is nothing to wait for


class Lane(enum.Enum):
    """One of the resources that work side by side."""

    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    HOST = "host"


class Kind(enum.Enum):
    """The purpose that a span of time was spent on, and the lane that it occupies."""

    FORWARD = "forward", Lane.COMPUTE
    BACKWARD = "backward", Lane.COMPUTE
    STALL = "stall", Lane.COMPUTE
    LOAD = "load", Lane.TO_DEVICE
    FETCH = "fetch", Lane.TO_DEVICE
    SUMS = "sums", Lane.TO_DEVICE
    GRADIENTS = "gradients", Lane.TO_HOST
    OFFLOAD = "offload", Lane.TO_HOST
    STEP = "step", Lane.HOST
    ADD = "add", Lane.HOST

    lane: Lane

    def __new__(cls, value: str, lane: Lane) -> Kind:
        """Make a member whose value is its name alone."""
        made = object.__new__(cls)
        made._value_, made.lane = value, lane
        return made


class Span(NamedTuple):
    """One piece of work on a lane, in seconds since the start of the recording.

    Its name is that of the unit that it was for; of a stall, what computing waited for.
    """

    lane: Lane
    kind: Kind
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Recording:
    """The course of a few steps; complete once the scope of `Pipeline.record` is left.

    Attributes:
        spans: All pieces of work, sorted by when they began. Stalls lie within forwards and backwards, or between them.
        steps: When each step began and ended. A step's work may end in the next step: they overlap.
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


class _Entry(NamedTuple):
    kind: Kind
    name: str
    nbytes: int
    ticket: Ticket | None
    begin: Any = None
    end: Any = None


class Trace:
    """A log of what a backend is asked to do, and for what. While nothing is recorded, a call costs next to nothing."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._entries: list[_Entry] | None = None
        self._steps: list[Any] = []
        self._recordings = 0
        self._open: _Entry | None = None

    def moved(self, kind: Kind, name: str, nbytes: int, ticket: Ticket) -> None:
        """Note a copy, or a job on the host, that has been given to the backend."""
        if self._entries is not None:
            self._entries.append(_Entry(kind, name, nbytes, ticket))

    def wait(self, ticket: Ticket, what: str) -> None:
        """Make computing wait for a ticket, and note how long it does."""
        if self._entries is None:
            self._lanes.wait(ticket)
            return
        begin = self._lanes.mark()
        self._lanes.wait(ticket)
        self._entries.append(_Entry(Kind.STALL, what, 0, None, begin, self._lanes.mark()))

    def begin(self, kind: Kind, name: str) -> None:
        """Note that a unit begins to compute, and that the one before it is done."""
        if self._entries is not None:
            self.end()
            self._open = _Entry(kind, name, 0, None, self._lanes.mark())

    def end(self) -> None:
        """Note that the unit that was computing is done."""
        if self._entries is not None and self._open is not None:
            self._entries.append(self._open._replace(end=self._lanes.mark()))
            self._open = None

    def begin_step(self) -> None:
        """Note that a step begins."""
        if self._entries is not None:
            self._steps.append(self._lanes.mark())

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record what happens in this scope; at its end the host waits for the device once.

        Recordings may overlap: a planner's and a timeline's do not know of each other.
        """
        origin = self._lanes.origin()
        if self._entries is None:
            self._entries, self._steps = [], []
        self._recordings += 1
        self._lanes.timed = True
        recording, first, first_step = Recording(), len(self._entries), len(self._steps)
        try:
            yield recording
        finally:
            self.end()
            entries, steps = self._entries[first:], [*self._steps[first_step:], self._lanes.mark()]
            self._recordings -= 1
            if not self._recordings:
                self._entries, self._lanes.timed = None, False
            self._lanes.drain()
            spans = [span for entry in entries if (span := self._span(entry, origin)) is not None]
            recording.spans = sorted(spans, key=lambda span: span.begin)
            moments = [self._lanes.seconds(origin.device, mark) for mark in steps]
            recording.steps = list(zip(moments[:-1], moments[1:], strict=True))

    def _span(self, entry: _Entry, origin: Origin) -> Span | None:
        if entry.ticket is not None:
            interval = entry.ticket.interval(origin)
            if interval is None:
                return None
            begin, end = interval
        else:
            begin = self._lanes.seconds(origin.device, entry.begin)
            end = self._lanes.seconds(origin.device, entry.end)
            if entry.kind is Kind.STALL and end - begin < _LEAST_STALL:
                return None
        return Span(entry.kind.lane, entry.kind, entry.name, begin, end, entry.nbytes)
