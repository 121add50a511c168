"""A device on which nothing takes time but what is said to: four virtual clocks, no real one.

    compute   what was launched on the device runs in order, as long as `compute(seconds)` says
    up, down  the two copy engines, each with its bandwidth
    host      work that reads and writes host memory: adding gradients, stepping an optimizer

The main thread is the host that launches; launching takes no time. Memory is really copied and jobs are really run, at
once, when they are asked for: numbers are right, and times are the same in every run, on any machine. A machine with a
drive is in simulated_drive.py.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.lanes.accelerator import copy_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Origin, Ticket, Worker, do_nothing
from sp_lightning.pipeline.lanes.lanes import Lane as OurLane


class Lane(enum.Enum):
    """What works beside the others."""

    COMPUTE = "compute"
    UP = "H2D"
    DOWN = "D2H"
    VISIT = "visits"
    HOST = "host"
    # of a machine with a drive
    DRIVE = "steps of what lies on the drive"
    READ = "read"
    WRITE = "write"
    MEMORY = "memory"
    EVENTS = "events"


COPIES = (Lane.UP, Lane.DOWN, Lane.VISIT)
OF_VISITS = {OurLane.TO_DEVICE: Lane.UP, OurLane.VISIT: Lane.VISIT, OurLane.TO_HOST: Lane.DOWN}


@dataclass(frozen=True)
class Span:
    """One piece of work, from when to when."""

    lane: Lane
    start: float
    end: float


class Shared:
    """What lanes share, the link or the host's memory: never more is moved in a second than its bandwidth."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._used: list[tuple[float, float, float]] = []  # from when to when, how much of it

    def left(self, moment: float) -> float:
        """The bandwidth that is left at a moment."""
        return self.bandwidth - sum(rate for begin, end, rate in self._used if begin <= moment < end)

    def changes(self, moment: float) -> float:
        """When that changes next."""
        return min((at for begin, end, _ in self._used for at in (begin, end) if at > moment), default=math.inf)

    def use(self, begin: float, end: float, rate: float) -> None:
        """Take a part of it for a while; of what ended long ago nothing is needed any more."""
        if self.bandwidth < math.inf and rate:
            self._used = [used for used in self._used[-400:] if used[1] > begin - 1e3 * (end - begin)]
            self._used.append((begin, end, rate))


@dataclass(frozen=True)
class Machine:
    """The time that one unit takes: computing, to the device, its gradient to the host, its optimizer step."""

    forward: float
    backward: float
    up: float
    down: float
    step: float


MACHINES = {
    "compute is the slowest": Machine(forward=1.0, backward=2.0, up=0.9, down=1.6, step=0.5),
    "sending is the slowest": Machine(forward=0.4, backward=0.8, up=1.0, down=0.9, step=0.5),
    "gradients are the slowest": Machine(forward=0.1, backward=0.9, up=0.1, down=2.0, step=0.5),
    "the optimizer is the slowest": Machine(forward=0.1, backward=0.9, up=0.1, down=0.9, step=2.0),
    "the optimizer falls behind in backward": Machine(forward=1.0, backward=1.5, up=0.5, down=0.5, step=2.4),
}


class SimulatedTicket(Ticket):
    """Done at a virtual time.

    Attributes:
        issued_at: When the device was told of it; the main thread cannot wait for it, or go on, before that.
    """

    issued_at = 0.0

    def __init__(self, backend: SimulatedBackend, end: float | None, seconds: float) -> None:
        self._backend = backend
        self._end = end
        self._seconds = seconds

    @property
    def end(self) -> float:
        """When it is done; of what has not been given its time as much is put in order as somebody wants to know."""
        if self._end is None:
            self._backend.put_in_order(until=self)
        assert self._end is not None
        return self._end

    @end.setter
    def end(self, end: float) -> None:
        self._end = end

    @property
    def waits(self) -> bool:
        """Whether it has not been given its time."""
        return self._end is None

    def interval(self, origin: Origin) -> tuple[float, float]:
        """In virtual time."""
        return self.end - self._seconds - origin.device, self.end - origin.device

    def join(self) -> None:
        """The main thread waits, or one that the engine has added."""
        self._backend.join(self)

    @property
    def done(self) -> bool:
        """Whether the main thread would not have to wait."""
        self._backend.put_in_order(until=self, begun=self._backend.main)
        return self._end is not None and self._end <= self._backend.main


@dataclass(eq=False)
class Pending:
    """What has still to take its time in a lane; its action was done at once, unless the backend defers it.

    What has the same stream keeps its order; `told` has to be done before the device is told of it.
    """

    ticket: SimulatedTicket
    lane: Lane
    asked: float
    after: Sequence[Ticket]
    seconds: float
    stream: str | None = None
    told: Sequence[Ticket] = ()
    job: Job | None = None
    action: Callable[[], None] = do_nothing

    @property
    def rank(self) -> int:
        """The rank of its job, which may change."""
        return 0 if self.job is None else self.job.rank

    @property
    def ready(self) -> float:
        """When all is done that it comes after; never, as long as some of that has not been given its time."""
        return max([self.asked, *ends_so_far(self.after)])


class SimulatedBackend(Backend):
    """A device with given bandwidths, on virtual clocks.

    Args:
        up: Bytes per second to the device.
        down: Bytes per second to the host.
        host: Bytes of weights per second that work on the host gets done.
        visit: Bytes per second that the steps of units that visit read and write on the device.
        both: Bytes per second of copies in both directions together.
        memory: Bytes of host memory per second, which copies and work on the host share.
        per_byte: Bytes of host memory that work moves for each byte it is said to move: state beside weights.

    Attributes:
        piece_seconds: Seconds that the update of a piece waits for its kernels.
        defers: Whether copies and work are done only when they are given their time.
    """

    defers: ClassVar[bool] = False

    def __init__(
        self,
        up: float,
        down: float,
        host: float,
        visit: float = math.inf,
        both: float = math.inf,
        memory: float = math.inf,
        per_byte: float = 1.0,
    ) -> None:
        super().__init__(torch.device("cpu"), False, Worker("unused"))
        self.memory_rate = visit
        self._rates = {Lane.UP: up, Lane.DOWN: down, Lane.VISIT: visit, Lane.HOST: host}
        self._memory = Shared(memory)
        self._link = Shared(both)
        self._per_byte = per_byte
        self._free = dict.fromkeys(Lane, 0.0)  # when what was given to each lane will be done
        self.main = 0.0  # when the main thread is here
        self._pending: list[Pending] = []
        self.spans: list[Span] = []
        self.piece_seconds = 0.0
        self._computed: list[tuple[float, float]] = []
        # what copies and updates have moved of the device's memory, and did not slow computing down for yet
        self._moved: list[tuple[float, float, float]] = []
        self._asked_after: Sequence[Ticket] = ()

    @property
    def now(self) -> float:
        """When the device will have computed what it was given so far, and the main thread has come here."""
        return max(self.main, self._free[Lane.COMPUTE])

    def mark(self) -> float:
        """The virtual time of the device."""
        return self.now

    def compute(self, seconds: float) -> None:
        """Launch something on the device."""
        begin = self.now
        seconds += self._slowed(begin)
        self._computed.append((begin, begin + seconds))
        self._free[Lane.COMPUTE] = begin + seconds
        self.spans.append(Span(Lane.COMPUTE, begin, begin + seconds))

    def _slowed(self, now: float) -> float:
        """Seconds that computing has lost until now: it waits for the device's memory half of the time.

        What moves beside it takes its part of that.
        """
        over = [each for each in self._moved if each[1] <= now]
        self._moved = [each for each in self._moved if each[1] > now]
        lost = 0.0
        for begin, end, nbytes in over:
            beside = 0.0
            for number in range(bisect(self._computed, (end,)) - 1, -1, -1):
                since, until = self._computed[number]
                if until <= begin:
                    break
                beside += min(end, until) - max(begin, since)
            lost += 0.5 * nbytes / self.memory_rate * beside / max(end - begin, 1e-12)
        return lost

    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        seconds = source.nbytes / self._rates[Lane.UP]
        behind = [] if after is None or after.done else [after]
        # those behind work hold up no other copy
        stream, not_before = None if behind else "up", self._free[Lane.COMPUTE]
        return self._ask(Lane.UP, seconds, behind, stream, not_before, behind, partial(copy_memory, target, source))

    def download(self, target: Tensor, source: Tensor) -> Ticket:
        seconds, not_before = source.nbytes / self._rates[Lane.DOWN], self._free[Lane.COMPUTE]
        return self._ask(Lane.DOWN, seconds, [], "down", not_before, action=partial(copy_memory, target, source))

    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        job.action()
        ours, told = OF_VISITS[kind.lane], self._asked_after
        seconds = job.nbytes / self._rates[ours] + (self.piece_seconds if ours is Lane.VISIT else 0.0)
        return self._ask(ours, seconds, [*job.after, *told], f"{ours} of visits", told=told)

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_memory(target, source)

    def computed(self) -> Ticket:
        return SimulatedTicket(self, self.now, 0.0)

    def issue_when_ready(self, job: Job) -> None:
        self._asked_after = job.after
        job.action()
        self._asked_after = ()
        job.finish()

    def work(self, job: Job) -> Ticket:
        """Run a job at once; its time on the host's worker thread comes when it is its turn."""
        job.action()
        job.cleanup()
        return self._ask(Lane.HOST, job.nbytes / self._rates[Lane.HOST], job.after, job=job)

    def _ask(
        self,
        lane: Lane,
        seconds: float,
        after: Sequence[Ticket],
        stream: str | None = None,
        not_before: float = 0.0,
        told: Sequence[Ticket] = (),
        action: Callable[[], None] = do_nothing,
        job: Job | None = None,
    ) -> SimulatedTicket:
        if not self.defers:
            action()
            action = do_nothing
        ticket, asked = SimulatedTicket(self, None, seconds), max(self.main, not_before)
        self._pending.append(Pending(ticket, lane, asked, after, seconds, stream, told, job, action))
        return ticket

    def join(self, ticket: SimulatedTicket) -> None:
        """Have the main thread wait."""
        self.main = max(self.main, ticket.end)

    def put_in_order(self, until: SimulatedTicket | None = None, begun: float = math.inf) -> None:
        """Give copies and work their time, what can begin first before the rest.

        Args:
            until: What somebody waits for. What comes after it may be overtaken by what is given later.
            begun: Only what begins before this moment.
        """
        while self._pending and (until is None or until.waits):
            begin, pending = self._first()
            if begin > begun:
                return
            self._give(pending, begin)

    def _first(self) -> tuple[float, Pending]:
        """When the next can begin, and what it is."""
        streams: set[str] = set()
        heads = []
        for pending in self._pending:
            if pending.stream not in streams:
                ready = pending.ready
                heads.append((max(ready, self._free[pending.lane]), pending.rank, ready, len(heads), pending))
            if pending.stream is not None:
                streams.add(pending.stream)
        begin, *_, pending = min(heads)
        return begin, pending

    def _give(self, pending: Pending, begin: float) -> None:
        """Give something its time in its lane."""
        self._pending.remove(pending)
        pending.ticket.issued_at = max(ends(pending.told), default=0.0)
        end = self._free[pending.lane] = pending.ticket.end = self._end(pending.lane, begin, pending.seconds)
        self.spans.append(Span(pending.lane, begin, end))
        if pending.lane in COPIES and self.memory_rate < math.inf:
            moving = pending.seconds - (self.piece_seconds if pending.lane is Lane.VISIT else 0.0)
            self._moved.append((begin, end, moving * self._rates[pending.lane]))

    def _end(self, lane: Lane, begin: float, seconds: float) -> float:
        """When work ends that goes on as fast as others leave of what is shared, of which it takes its part."""
        needs = [(shared, need) for shared, need in self._needs(lane) if shared.bandwidth < math.inf]
        if not needs:
            return begin + seconds
        while seconds > 1e-12:
            speed = min(1.0, *(max(0.0, shared.left(begin)) / need for shared, need in needs))
            until = min(shared.changes(begin) for shared, _ in needs)
            if speed:
                until = min(until, begin + seconds / speed)
            seconds -= speed * (until - begin)
            for shared, need in needs:
                shared.use(begin, until, speed * need)
            begin = until
        return begin

    def _needs(self, lane: Lane) -> list[tuple[Shared, float]]:
        """What a lane takes of what is shared, in bytes per second."""
        if lane in (Lane.UP, Lane.DOWN):
            return [(self._link, self._rates[lane]), (self._memory, self._rates[lane])]
        if lane is Lane.HOST:
            return [(self._memory, self._rates[lane] * self._per_byte)]
        return []

    def wait(self, ticket: Ticket) -> None:
        self._free[Lane.COMPUTE] = max(self._free[Lane.COMPUTE], *ends([ticket]))
        self.main = max(self.main, *(asked.issued_at for asked in simulated([ticket])))

    def drain(self) -> None:
        self.put_in_order()
        self.main = max(self.main, *self._free.values())

    def busy(self, lane: Lane, since: float, until: float) -> float:
        """Seconds of work in a lane that began between two moments."""
        spans = [span for span in self.spans if span.lane is lane and since <= span.start < until]
        return sum(span.end - span.start for span in spans)


def simulated(tickets: Iterable[Ticket]) -> list[SimulatedTicket]:
    """Those with a time of their own; a visit's is that of its last piece."""
    own = [ticket.issued() for ticket in tickets]
    return [ticket for ticket in own if isinstance(ticket, SimulatedTicket)]


def ends(tickets: Iterable[Ticket]) -> list[float]:
    return [ticket.end for ticket in simulated(tickets)]


def ends_so_far(tickets: Iterable[Ticket]) -> list[float]:
    """When they are done; never, for what has not been given its time."""
    return [math.inf if ticket.waits else ticket.end for ticket in simulated(tickets)]


WIDTH = 64
UNIT_BYTES = 4 * WIDTH * WIDTH  # of a `TimedBlock` of that width: nothing is lost to alignment
STEP_BYTES = 3 * UNIT_BYTES  # what a step of it reads and writes: a gradient, and weights twice


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SimulatedBackend, forward: float, backward: float) -> Tensor:
        backend.compute(forward)
        ctx.backend, ctx.seconds = backend, backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.backend.compute(ctx.seconds)
        return gradient, None, None, None


class TimedBlock(nn.Module):
    """A unit of one square weight that takes so many seconds in forward and in backward."""

    def __init__(self, width: int, backend: SimulatedBackend, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.backend, self.seconds = backend, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        # the output's node is the first that backward runs, so the time passes before the gradient is there
        return _Timed.apply(self.linear(x), self.backend, *self.seconds)
