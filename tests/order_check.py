"""A checker of ordering: every wait that memory requires has to be issued, whether or not a race shows in numbers.

Copies, jobs on the host and computing touch memory. If two touch the same bytes, and one of them writes, the later one
has to come after the earlier one. The engine says so in few ways, all of which the checker follows:

    upload, download    come after all that computing was given before, and after earlier copies of their direction
    `after`             a job, or an upload, comes after these tickets; a GPU-side update also after its lane
    `Backend.wait`      computing waits for a ticket
    `join`, `done`      the host has waited for a ticket, or has seen that it is done: so whatever it asks for later
                        comes after that
    landing buffers     are handed out when the job that has read them is over

What is touched is known of a copy by its tensors, of a job by its work (`accesses_of`), and of computing and of the
host where the engine brings or frees memory, or guards it. What no order covers fails the test, even if the emulated
device was quick enough. Everything has a number, a single bit; a set of numbers is an integer.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce, wraps
from itertools import chain
from operator import or_
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

from torch import Tensor

from sp_lightning.pipeline.activations.offload import Activation, Offloaded, Offloader
from sp_lightning.pipeline.calls.guard import Guard
from sp_lightning.pipeline.gradients import routes
from sp_lightning.pipeline.gradients.gradient_memory import GradientMemory, LandingBuffer
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.lanes.accelerator import HostBackend
from sp_lightning.pipeline.lanes.backend import Backend, Trace
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket, Worker
from sp_lightning.pipeline.processes.box import SharedMemory
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window

from .order_accesses import accesses_of

Tensors = Iterable[Any]
"""Tensors, and other things in between, which are passed over."""
Hook = Generator[None, Any, None]
"""What is done before a call, and after it, with what it returns."""


class Access(NamedTuple):
    """Something that has touched memory."""

    memory: Tensor  # held, or other tensors could get its address
    begin: int
    end: int
    writes: bool
    number: int
    what: str
    # the job that has asked for it, if one has; and those whose tickets it comes after, with all that they will ask for
    asked_by: object
    awaits: Sequence[object]

    def is_after(self, other: Access) -> bool:
        """Whether it awaits what asks for the other."""
        return any(job is other.asked_by for job in self.awaits)


class OrderCheck:
    """What copies, jobs and computing are known to come after, and what they touch."""

    def __init__(self) -> None:
        self.missing: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._here = threading.local()  # of each thread: the job that it runs, whether it waits for computing
        self._landing: dict[int, Job] = {}  # the jobs that read landing buffers
        self._tickets: dict[int, tuple[Any, int]] = {}
        # what a process sees at two addresses, while neither hides what is written there from the other
        self._mapped_twice: WeakSet[SharedMemory] = WeakSet()
        self._forget()

    def _forget(self) -> None:
        """Everything is done."""
        self._live: list[Access] = []
        self._next = 1
        self._host = self._computing = 0  # what is done for whatever these do next
        self._lanes: defaultdict[object, int] = defaultdict(int)
        self._tickets.clear()
        self._asking: dict[int, tuple[object, list[object]]] = {}  # for each job, those that ask for what comes before

    # ------------------------------------------------------------------------------------------- what comes after what

    def done_with(self, ticket: Any) -> int:
        """What is done when a ticket is."""
        known = self._tickets.get(id(ticket), (None, 0))[1]
        for name in ("job", "ticket", "copied"):  # of a `DeferredTicket`, and of what tests put around a ticket
            inner = getattr(ticket, name, None)
            known |= self.done_with(inner) if isinstance(inner, Ticket) else 0
        return known

    def asking_for(self, tickets: Iterable[object]) -> list[object]:
        """The jobs that ask for what is to come first, for what comes before that, and so on; or have asked."""
        jobs: list[object] = []
        for ticket in tickets:
            job = getattr(ticket, "job", None)
            jobs += [] if job is None else [job]
            jobs += [each for known in (ticket, job) for each in self._asking.get(id(known), (None, []))[1]]
        return list(dict.fromkeys(jobs))

    @property
    def _what(self) -> str:
        return getattr(self._here, "what", "something")

    def _known_here(self) -> int:
        job: int | None = getattr(self._here, "job", None)
        return self._host if job is None else job

    def learn(self, known: int) -> None:
        """This thread has waited for that."""
        if getattr(self._here, "job", None) is not None:
            self._here.job |= known
            job = getattr(self._here, "runs", None)
            with self._lock:
                if id(job) in self._tickets:  # before the job is done, and others rely on it
                    self._tickets[id(job)] = job, self._tickets[id(job)][1] | known
        # the engine's threads look for what is done on behalf of jobs; computing is the host's thread here
        elif not (getattr(self._here, "computes", False) or threading.current_thread().name.startswith("superpipe")):
            self._host |= known

    def ask(
        self,
        ticket: Any,
        what: str,
        known: int,
        reads: Tensors,
        writes: Tensors,
        lane: object = None,
        awaits: Sequence[object] = (),
    ) -> None:
        """This thread asks for something that comes after what is `known`, and after what its lane has to do."""
        with self._lock:
            known |= self._known_here() | (0 if lane is None else self._lanes[lane])
            known |= self.touch(what, known, reads, writes, awaits)
            self._tickets[id(ticket)] = ticket, known
            self._lanes[lane] = known

    def compute(self, what: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Computing, as the host asks for it now, touches memory."""
        with self._lock:
            self._computing |= self._host
            self._computing |= self.touch(f"computing, which {what},", self._computing, reads, writes)

    def free(self, what: str, *memory: Any) -> None:
        """Computing lets go of device memory; whatever gets it then comes after computing."""
        with self._lock:
            self.compute(f"frees {what}", (), memory)
            self._live = [access for access in self._live if access.number << 1 != self._next]

    def touch_here(self, what: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        """This thread touches memory."""
        with self._lock:
            self.learn(self.touch(f"the host, which {what},", self._known_here(), reads, writes))

    def touch(self, what: str, known: int, reads: Tensors, writes: Tensors, awaits: Sequence[object] = ()) -> int:
        """Compare what touches memory with what has touched it before; return its number."""
        number, self._next = self._next, self._next << 1
        done = self._host
        self._live = [access for access in self._live if not access.number & done]  # the host asks for all else
        by = getattr(self._here, "runs", None)
        for is_written, tensors in enumerate((reads, writes)):
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.nbytes:
                    begin = self._address_of(tensor)
                    end = begin + tensor.nbytes
                    self._compare(Access(tensor, begin, end, bool(is_written), number, what, by, awaits), known)
        return number

    def _address_of(self, tensor: Tensor) -> int:
        """Where it lies; memory that is mapped twice has one address."""
        begin = tensor.data_ptr()
        for shared in self._mapped_twice:
            if 0 <= (offset := begin - shared.own.data_ptr()) < shared.own.nbytes:
                return shared.bytes.data_ptr() + offset
        return begin

    def _compare(self, later: Access, known: int) -> None:
        begin, end = later.begin, later.end
        known |= later.number
        covered: set[int] = set()
        for earlier in [access for access in self._live if access.begin < end and begin < access.end]:
            is_ordered = bool(earlier.number & known) or earlier.is_after(later) or later.is_after(earlier)
            if not is_ordered and (earlier.writes or later.writes):
                how, before = "writes" if later.writes else "reads", "written" if earlier.writes else "read"
                self.missing[f"{later.what} {how} what {earlier.what} may not have {before} yet"] += 1
            is_within = begin <= earlier.begin and earlier.end <= end
            if is_within and is_ordered and (later.writes or not earlier.writes):
                covered.add(id(earlier))
        if covered:
            self._live = [access for access in self._live if id(access) not in covered]
        self._live.append(later)

    # ---------------------------------------------------------------------------- copies, jobs, and who waits for them

    def _note_name(self, _: Trace, kind: Kind, name: str, *args: Any) -> Hook:
        before, self._here.what = self._what, f"the {kind.label} of {name}"
        yield
        self._here.what = before

    def _upload(self, _: Backend, target: Tensor, source: Tensor, after: Ticket | None = None) -> Hook:
        known = self._computing | self.done_with(after)
        ticket = yield
        # a GPU-side update asks for its pieces when it begins
        self.ask(
            ticket, self._what, known, [source], [target], "up" if after is None else None, self.asking_for([after])
        )

    def _download(self, _: Backend, target: Tensor, source: Tensor) -> Hook:
        ticket = yield
        self.ask(ticket, self._what, self._computing, [source], [target], "down")

    def _on_drive(self, worker: Worker, job: Job) -> Hook:
        if worker._name.endswith(("-drive", "-read", "-write")):
            yield from self._job(worker, job)
        else:
            yield

    def _job(self, _: Any, job: Job) -> Hook:
        owner, args = getattr(job.cleanup, "__self__", None), getattr(job.cleanup, "args", ())
        for buffer in [owner, *chain.from_iterable(each for each in args if isinstance(each, list))]:
            if isinstance(buffer, LandingBuffer):
                self._landing[id(buffer)] = job
        known = reduce(or_, map(self.done_with, job.after), 0)
        asking = self.asking_for(job.after)
        self._asking[id(job)] = job, asking
        self.ask(job, self._what, known, *accesses_of(job.action), awaits=asking)
        yield

    def _beside(self, _: Backend, kind: Kind, job: Job) -> Hook:
        self.ask(job, self._what, reduce(or_, map(self.done_with, job.after), 0), *accesses_of(job.action), kind)
        yield

    def _run(self, job: Job, *_: Any) -> Hook:
        before, self._here.job = getattr(self._here, "job", None), self.done_with(job)
        self._here.runs = job
        try:
            yield
        finally:
            self._here.job = before
            self._here.runs = None

    def _wait(self, _: Backend, ticket: Ticket) -> Hook:
        self._here.computes = True
        try:
            yield
            self._computing |= self._host | self.done_with(ticket)
        finally:
            self._here.computes = False

    def _computed(self, _: Backend) -> Hook:
        ticket = yield
        self._tickets[id(ticket)] = ticket, self._computing | self._host

    def _join(self, job: Job) -> Hook:
        yield
        self.learn(self.done_with(job))

    def _drain(self, _: Backend) -> Hook:
        yield
        with self._lock:
            self._forget()

    def _take_landing(self, _: routes.LandingBuffers, nbytes: int) -> Hook:
        buffer = yield
        self.learn(self.done_with(self._landing.get(id(buffer))))

    # ------------------------------------------------------------------------------ what computing and the host touch

    def _bring(self, _: Window, unit: Unit) -> Hook:
        held: Any = () if unit.update.ticket is None else unit.update.ticket.keeps_alive
        yield
        self.compute(f"has weights of {unit.name}", [unit.presence.place])
        self.free("gradients", *[update.gradient for update in held if update.work.gradient is None])

    def _take_staging(self, _: routes.StagingBuffers, nbytes: int) -> Hook:
        buffer: GradientMemory = yield
        self.compute("puts gradients together", (), [buffer.bytes])

    def _unpack(self, _: Offloader, packed: Offloaded) -> Hook:
        yield
        self.compute(f"has activations of {packed.activation.unit}", [packed.activation.device])

    def _release_activation(self, activation: Activation) -> Hook:
        with self._lock:
            # its own copy: another version of the same memory may still be leaving, and keeps it
            if self.done_with(activation.ticket) & ~(self._computing | self._host):
                self.missing[f"computing frees what the offload of {activation.unit} may not have read yet"] += 1
            memory = activation.device
            self._live = [access for access in self._live if memory is None or access.begin != memory.data_ptr()]
        yield

    def _access(self, _: Guard, weight: Weight, writes: bool = False) -> Hook:
        yield
        self.touch_here(f"has {weight.name}", [weight.current_memory], [weight.current_memory] if writes else [])

    def _write_back(self, _: Window, weight: Weight) -> Hook:
        yield
        self.touch_here(f"writes {weight.name} back", (), [weight.current_memory])

    def _take_gradient(self, gradient: Gradient) -> Hook:
        read = gradient.tensor, *gradient.factors
        yield
        self.touch_here(f"has the gradient of {gradient.weight.name}", read)

    def _refresh(self, segment: Segment, stepped: Iterable[Weight] = ()) -> Hook:
        if segment.sends_copies and not stepped and segment._copied_epoch != segment.epoch:
            self.touch_here("lowers weights", [weight.current_memory for weight in segment.weights], segment.copies)
        yield

    def _map_own(self, shared: SharedMemory, hides: bool) -> Hook:
        yield
        if hides:
            self._mapped_twice.discard(shared)
        else:
            self._mapped_twice.add(shared)

    def _share(self, segment: Segment) -> Hook:
        shared = segment.memory.shared
        if shared is not None and shared.is_hidden and not segment.is_stepped_elsewhere:
            self.touch_here("shares edits", [shared.own], [shared.bytes])
        yield

    def _free(self, buffer: HostBuffer) -> Hook:
        self.touch_here("frees memory", (), [buffer.bytes])
        yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what the engine does in this scope."""
        hooks: list[tuple[type, str, Callable[..., Hook]]] = [
            (Trace, "_request", self._note_name), (Trace, "work", self._note_name),
            (HostBackend, "upload", self._upload), (HostBackend, "download", self._download),
            (Backend, "work", self._job), (Worker, "submit", self._on_drive),
            (Backend, "issue_when_ready", self._job),
            (HostBackend, "submit_to_lane", self._beside), (HostBackend, "wait", self._wait), (Job, "run", self._run),
            (Backend, "computed", self._computed), (Job, "join", self._join), (HostBackend, "drain", self._drain),
            (routes.LandingBuffers, "take", self._take_landing), (routes.StagingBuffers, "take", self._take_staging),
            (Window, "bring", self._bring), (Window, "_write_to_master", self._write_back),
            (Offloader, "unpack", self._unpack), (Activation, "release", self._release_activation),
            (Guard, "before_access", self._access), (Gradient, "take", self._take_gradient),
            (Segment, "refresh_copies", self._refresh), (HostBuffer, "release", self._free),
            (SharedMemory, "map_own", self._map_own), (Segment, "share_edits", self._share),
        ]  # fmt: skip

        def is_done(job: Job) -> bool:
            done: bool = vars(job).get("done", False)
            if done:
                self.learn(self.done_with(job))
            return done

        with ExitStack() as stack:
            for cls, name, hook in hooks:
                stack.enter_context(patch.object(cls, name, _with_hook(getattr(cls, name), hook)))
            stack.enter_context(
                patch.object(Job, "done", property(is_done, lambda job, done: vars(job).update(done=done)))
            )
            yield


def _with_hook(function: Callable[..., Any], hook: Callable[..., Hook]) -> Callable[..., Any]:
    @wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        around = hook(*args, **kwargs)
        next(around)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            around.close()
            raise
        with suppress(StopIteration):
            around.send(result)
        return result

    return hooked


@contextmanager
def order_checked() -> Iterator[OrderCheck]:
    """Raise at the end of this scope if the engine has left out a wait that memory requires."""
    check = OrderCheck()
    with check.following():
        yield check
    missing = "\n".join(f"  {count} times: {what}" for what, count in check.missing.most_common())
    assert not missing, f"nothing orders these accesses to memory:\n{missing}"
