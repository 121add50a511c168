"""What the lanes of a step were busy with, from when to when; written down only while somebody asks for it.

    compute     forwards and backwards of units, and stalls: computing had to wait for a copy
    to device   weights, and activations that come back; with several processes, sums of gradients to be averaged
    to host     gradients, and activations that leave
    host        units being stepped, gradients being added up

Every backend has a `Trace`. The parts of the engine tell it what a copy or a piece of work is for; when that began and
ended is asked of its ticket, after the recording. Timeline, planner and callback read the result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sp_lightning.pipeline.transfer.backend import Backend, Ticket

_NO_STALL = 20e-6  # seconds that asking takes when there is nothing to wait for


class Lane(enum.Enum):
    """What works beside the others."""

    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    HOST = "host"


class Kind(enum.Enum):
    """What a span of time was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STALL = "stall"
    LOAD = "load"
    FETCH = "fetch"
    SUMS = "sums"
    GRADIENTS = "gradients"
    OFFLOAD = "offload"
    STEP = "step"
    ADD = "add"

    @property
    def lane(self) -> Lane:
        """Where it happens."""
        return _LANES[self]


_LANES = {
    Kind.FORWARD: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.STALL: Lane.COMPUTE,
    Kind.LOAD: Lane.TO_DEVICE,
    Kind.FETCH: Lane.TO_DEVICE,
    Kind.SUMS: Lane.TO_DEVICE,
    Kind.GRADIENTS: Lane.TO_HOST,
    Kind.OFFLOAD: Lane.TO_HOST,
    Kind.STEP: Lane.HOST,
    Kind.ADD: Lane.HOST,
}


class Span(NamedTuple):
    """One piece of work.

    Attributes:
        lane: Where it ran.
        kind: What it was.
        name: The unit that it was for; of a stall, what computing waited for.
        begin: When it began, in seconds since the recording did.
        end: When it ended.
        nbytes: Bytes that it moved.
    """

    lane: Lane
    kind: Kind
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Recording:
    """What happened in some steps; complete when the scope of `Pipeline.record` is left.

    Attributes:
        spans: All pieces of work, by when they began. Stalls lie inside of forwards and backwards, or between them.
        steps: When each step began and ended. The work of one may end in the next: it overlaps.
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


class Origin(NamedTuple):
    """When a recording began: as the device and as the host tell it."""

    device: Any
    host: float


class _Entry(NamedTuple):
    kind: Kind
    name: str
    nbytes: int
    ticket: Ticket | None
    begin: Any = None
    end: Any = None


class Trace:
    """Writes down what a backend is asked to do, and for what. While nothing is recorded, a call costs next to nothing.

    Args:
        backend: Its clocks, and what computing waits for.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._entries: list[_Entry] | None = None
        self._steps: list[Any] = []
        self._recordings = 0
        self._open: _Entry | None = None

    @property
    def is_recording(self) -> bool:
        """Whether anything is written down."""
        return self._entries is not None

    def moved(self, kind: Kind, name: str, nbytes: int, ticket: Ticket) -> None:
        """A copy, or work on the host, has been given to the backend."""
        if self._entries is not None:
            self._entries.append(_Entry(kind, name, nbytes, ticket))

    def wait(self, ticket: Ticket, what: str) -> None:
        """Make computing wait for a ticket, and note for how long it did."""
        if self._entries is None:
            self._backend.wait(ticket)
            return
        begin = self._backend.mark()
        self._backend.wait(ticket)
        self._entries.append(_Entry(Kind.STALL, what, 0, None, begin, self._backend.mark()))

    def begin(self, kind: Kind, name: str) -> None:
        """A unit begins to compute; whichever did so before is done."""
        if self._entries is not None:
            self.end()
            self._open = _Entry(kind, name, 0, None, self._backend.mark())

    def end(self) -> None:
        """The unit that computed last is done."""
        if self._entries is not None and self._open is not None:
            self._entries.append(self._open._replace(end=self._backend.mark()))
            self._open = None

    def begin_step(self) -> None:
        """A new step begins."""
        if self._entries is not None:
            self._steps.append(self._backend.mark())

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Write down what happens in this scope; at its end the host waits for the device once.

        Several may be under way at once: a planner's and a timeline's do not know of each other.
        """
        if self._entries is None:
            self._entries, self._steps = [], []
        self._recordings += 1
        self._backend.timed = True
        recording, first, first_step = Recording(), len(self._entries), len(self._steps)
        origin = self._backend.origin()
        try:
            yield recording
        finally:
            self.end()
            entries, steps = self._entries[first:], [*self._steps[first_step:], self._backend.mark()]
            self._recordings -= 1
            if not self._recordings:
                self._entries, self._backend.timed = None, False
            self._backend.drain()
            spans = [span for entry in entries if (span := self._span(entry, origin)) is not None]
            recording.spans = sorted(spans, key=lambda span: span.begin)
            moments = [self._backend.seconds(origin.device, mark) for mark in steps]
            recording.steps = list(zip(moments[:-1], moments[1:], strict=True))

    def _span(self, entry: _Entry, origin: Origin) -> Span | None:
        if entry.ticket is not None:
            interval = entry.ticket.interval(origin)
            if interval is None:
                return None
            begin, end = interval
        else:
            begin = self._backend.seconds(origin.device, entry.begin)
            end = self._backend.seconds(origin.device, entry.end)
            if entry.kind is Kind.STALL and end - begin < _NO_STALL:
                return None
        return Span(entry.kind.lane, entry.kind, entry.name, begin, end, entry.nbytes)
