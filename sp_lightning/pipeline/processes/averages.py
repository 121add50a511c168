"""Averages of gradients over processes: they go round between devices, and land in memory that a machine's share.

In a backward pass of all processes each trained segment is *exchanged* once. Its gradients are packed on the device, as
they came; each process gets its share of everyone's, adds it up in the order of ranks, and downloads it to where its
part of the sums is. Shares of several machines are added up before. So all of it crosses each link as often as if one
process were alone, and the sums are the same in every run.

All processes exchange segments in one order, that of the first one, from the last unit to the first: what comes before
its turn waits on the device, and what a process does not use is sent as zeros when its backward ends. A unit may be
stepped when the shares of all have landed, and none reads its masters any more.

Gradients that somebody sees in any process, by its `.grad` or by hooks, are each process's own until backward has
ended, and are averaged then, as `.grad`. What each process has is told before and after a pass.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.routes import Routes
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, GradientMemory, SegmentGradients
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.processes.sums import Run, SharedSums
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.window.window import Window


@dataclass(eq=False)
class _UnderWay:
    """A run that goes round."""

    of_segment: SegmentGradients
    gradients: Collection[Gradient]  # that this process has brought
    sums: SharedSums
    run: Run
    dtype: torch.dtype  # in which it goes
    sent: GradientMemory
    received: GradientMemory
    work: Any  # torch's handle to it


class Averages:
    """Averages the gradients of segments, one after the other."""

    def __init__(
        self,
        by_segment: Sequence[SegmentGradients],
        window: Window,
        routes: Routes,
        processes: Processes,
    ) -> None:
        self._by_segment = by_segment
        self._window = window
        self._routes = routes
        routes.staging.count *= 2  # for what comes as many as for what leaves
        self._processes = processes
        self._sums: dict[SegmentGradients, SharedSums] = {}
        # made in one order in all processes, which may expect units in other orders
        for of_segment in sorted(by_segment, key=_name):
            segment = of_segment.segment
            if segment.weights[0].master.requires_grad and segment.memory.shared is not None:
                sums = self._sums[of_segment] = SharedSums(segment.weights, segment.memory)
                for run in sums.runs:
                    routes.landing.make_room(sums.share(run).nbytes)
        # what is resident is complete when backward ends
        self._order = sorted(self._sums, key=lambda each: (each.unit.resident, -each.unit.index))
        self._has_begun = False  # whether a pass of all processes is under way
        self._to_come: dict[SegmentGradients, SharedSums] = {}  # of this pass, in order
        self._exchanged: dict[SegmentGradients, SharedSums] = {}
        self._ready: set[SegmentGradients] = set()
        self._under_way: deque[_UnderWay] = deque()
        # the copies of a segment's shares to the host
        self._landing: dict[SegmentGradients, list[Ticket]] = {}

    @property
    def lacks_some(self) -> bool:
        """Whether a weight is trained now that has no sum, as it was frozen when weights were placed."""
        lacking = [of_segment for of_segment in self._by_segment if of_segment not in self._sums]
        gradients = chain.from_iterable(of_segment.gradients for of_segment in lacking)
        return any(gradient.weight.master.requires_grad for gradient in gradients)

    # ------------------------------------------------------------------------------------------ in a backward pass

    def begin_pass(self) -> None:
        """Begin a pass of all processes, if none is under way, and this is none of this process's own."""
        if self._has_begun or not self._processes.trains:
            return
        named = {_name(of_segment): of_segment for of_segment in self._order}
        own = {name: _held(each, self._sums[each]) for name, each in named.items()}
        everyones = self._processes.gather_in_step(own)
        self._has_begun = True
        for name in everyones[0]:
            of_segment, held = named[name], own[name]
            if held is None or any(each[name] != held for each in everyones):
                continue
            sums = self._to_come[of_segment] = self._sums[of_segment]
            sums.is_held = bool(held)
            sums.present = set(held)
        for of_segment in self._by_segment:
            if of_segment not in self._to_come:
                for gradient in of_segment.gradients:
                    gradient.show()

    def has(self, of_segment: SegmentGradients) -> bool:
        """Tell whether a segment is exchanged in this pass."""
        return of_segment in self._to_come or of_segment in self._exchanged

    def adds_up(self, gradient: Gradient) -> bool:
        """Tell whether a gradient that has come is to be exchanged with others of its segment.

        Raises:
            RuntimeError: These have been exchanged.
        """
        if gradient.of_segment in self._exchanged:
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a second gradient in this backward pass, when "
                "the processes had added up the first. Let checkpoints around its "
                "module have `use_reentrant=False`."
            )
        return gradient.of_segment in self._to_come

    def send(self, of_segment: SegmentGradients, is_final: bool) -> list[SegmentGradients]:
        """Exchange what a segment has gathered when its turn comes, if that is all; return what has come round by now.

        It is if it `is_final` and complete, or if no node has any of the weights whose gradients are missing.
        """
        if is_final if not of_segment.missing else not of_segment.unit.handles:
            self._ready.add(of_segment)
        return self._exchange_ready()

    def send_rest(self) -> list[SegmentGradients]:
        """Exchange the rest, as backward has ended; return what has come round."""
        self._ready.update(self._to_come)
        return [*self._exchange_ready(), *self.come_round()]

    def _exchange_ready(self) -> list[SegmentGradients]:
        come: list[SegmentGradients] = []
        while self._to_come and (of_segment := next(iter(self._to_come))) in self._ready:
            sums = self._exchanged[of_segment] = self._to_come.pop(of_segment)
            # it may still read the sums
            self._window.finish_optimizer(of_segment.unit)
            gathered = of_segment.take_gathered()
            sums.present.update(sums.index[gradient.weight] for gradient in gathered)
            sums.begin()
            self._landing[of_segment] = []
            for run in sums.runs:
                come += self.come_round(1)
                self._under_way.append(self._send(of_segment, gathered, sums, run))
        self._ready.difference_update(self._exchanged)
        return come

    def _send(
        self,
        of_segment: SegmentGradients,
        gathered: Mapping[Gradient, Tensor],
        sums: SharedSums,
        run: Run,
    ) -> _UnderWay:
        # the first step shows in which dtypes gradients come
        dtype = run.dtype if self._processes.steps else run.sum_dtype
        nbytes = run.numel * dtype.itemsize
        sent, received = (self._routes.staging.take(nbytes) for _ in range(2))
        brought = {gradient.weight: tensor for gradient, tensor in gathered.items()}
        with torch.no_grad():
            targets: list[Tensor] = []
            tensors: list[Tensor] = []
            places = run.views(sent.bytes, dtype)
            for weight, place in zip(run.weights, places, strict=True):
                if weight in brought:
                    targets.append(place)
                    tensors.append(brought[weight])
            if len(targets) < len(places):
                sent.bytes.zero_()
            if targets:
                torch._foreach_copy_(targets, tensors)
            # as bytes: groups cannot send every dtype
            own, others = sent.bytes[:nbytes], received.bytes[:nbytes]
            work = dist.all_to_all_single(others, own, group=self._processes.beside, async_op=True)
        return _UnderWay(of_segment, list(gathered), sums, run, dtype, sent, received, work)

    @torch.no_grad()
    def come_round(self, left: int = 0) -> list[SegmentGradients]:
        """Wait for what goes round, but for so many runs, and add shares up; return what is complete."""
        come: list[SegmentGradients] = []
        while len(self._under_way) > left:
            each = self._under_way.popleft()
            of_segment, sums = each.of_segment, each.sums
            each.work.wait()
            self._landing[of_segment].append(self._download(each))
            if each.run is sums.runs[-1]:
                for gradient in each.gradients:
                    gradient.come(sums.places[sums.index[gradient.weight]])
                come.append(of_segment)
        return come

    def _download(self, each: _UnderWay) -> Ticket:
        """Add up this process's share of a run, and bring it to the sums."""
        run, processes = each.run, self._processes
        received = each.received.bytes[: run.numel * each.dtype.itemsize]
        parts = received.view(each.dtype).view(processes.box.count, -1)
        dtype = torch.promote_types(run.sum_dtype, torch.float32)
        total = torch.zeros(parts.shape[1], dtype=dtype, device=parts.device)
        for part in parts:
            total.add_(part, alpha=1 / processes.count)
        if processes.machines > 1:
            dist.all_reduce(total, group=processes.across)
        share = each.sums.share(run)
        # what was sent has left; a copy may read this as long as it takes
        source = each.sent.bytes[: share.nbytes]
        source.view(run.sum_dtype).copy_(total)
        name = each.of_segment.unit.name
        buffer = self._routes.landing.take(share.nbytes) if each.sums.is_held else None
        target = as_bytes(share) if buffer is None else buffer.bytes[: share.nbytes]
        trace = self._window.backend.trace
        ticket = each.sent.ticket = trace.download(Kind.GRADIENTS, name, target, source)
        self._window.stats.bytes_to_host += share.nbytes
        if buffer is not None:
            adds = partial(add, share, target.view(run.sum_dtype))
            return trace.work(Kind.ADD, name, Job(adds, [ticket], 2 * share.nbytes, buffer.release))
        return ticket

    def pass_on(self, of_segment: SegmentGradients, after: Iterable[Ticket] = (), measures_norms: bool = False) -> None:
        """Tell others that a unit may be stepped when its sums have landed, as far as this process is concerned."""
        sums, backend = self._exchanged[of_segment], self._window.backend
        own = Job(
            partial(sums.land, sums.number),
            [*self._landing.pop(of_segment), *after],
            cleanup=partial(sums.fail_unless_landed, sums.number),
        )
        backend.work(own)
        everyones = sums.complete()
        if measures_norms:
            if sums.box.is_keeper:
                measures = partial(sums.measure_norms, sums.number, sorted(sums.present))
                backend.work(Job(measures, [everyones]))
            everyones = sums.measured()
        # an error of its own is raised, and not waited for as if others were late
        of_segment.wait_for(backend.work(Job(after=[own, everyones])))

    # -------------------------------------------------------------------------------------------- when it has ended

    def end_pass(self, named: Mapping[str, nn.Parameter]) -> None:
        """End a pass of all processes; the gradients of other parameters, by their names, are averaged with it.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if not self._processes.trains:
            return
        self._processes.passes += 1
        self.begin_pass()
        self.send_rest()
        others = dict(named)
        for of_segment in self._by_segment:
            if of_segment not in self._exchanged:
                for gradient in of_segment.gradients:
                    gradient.show()
                    others[gradient.weight.name] = gradient.weight.master
        gradients = {name: each.grad for name, each in others.items() if each.grad is not None}
        is_sparse = any(gradient.layout is not torch.strided for gradient in gradients.values())
        present = [sorted(sums.present) for sums in self._exchanged.values()]
        everyones = self._processes.gather_in_step((present, list(gradients), is_sparse))
        everyones_present, names, are_sparse = zip(*everyones, strict=True)
        for sums, *brought in zip(self._exchanged.values(), *everyones_present, strict=True):
            sums.present.update(*brought)
        self._adopt()
        if any(are_sparse):
            raise RuntimeError(
                "Sparse gradients are not averaged over processes. Let the layer have "
                "`sparse=False`, or train it on one device."
            )
        if self._processes.averages:
            self._processes.average(others[name] for name in sorted(set().union(*names)))

    def _adopt(self) -> None:
        """Take the sums for the gradients of units that were not stepped with them."""
        measures_norms = self._routes.measures_norms
        for of_segment, sums in self._exchanged.items():
            if of_segment not in self._landing:  # it was passed on
                continue
            self.pass_on(of_segment, (), measures_norms)
            for number in sums.present:
                gradient = of_segment.gradients[number]
                of_segment.hold()
                gradient.come(sums.places[number], sums.norms[number] if measures_norms else None)
        self._end()

    def abandon_pass(self) -> None:
        """Have others not wait for this process's part of a pass that an exception has ended."""
        # its error was raised already, or is due to the exception
        with contextlib.suppress(Exception):
            if self._processes.trains:
                self.begin_pass()
                self.send_rest()
                self._adopt()

    def _end(self) -> None:
        self._exchanged = {}
        self._has_begun = False


def _name(of_segment: SegmentGradients) -> str:
    return of_segment.segment.weights[0].name


def _held(of_segment: SegmentGradients, sums: SharedSums) -> tuple[int, ...] | None:
    """Return the numbers of the weights whose sums a process has; None if not all gradients can be added to these."""
    of_segment.wait()  # others are about to write to sums that a clip reads here
    held: list[int] = []
    for number, gradient in enumerate(of_segment.gradients):
        is_sum = gradient.tensor is sums.places[number] and not gradient.factors
        if gradient.is_seen or (gradient.tensor is not None and not is_sum):
            return None
        if is_sum:
            held.append(number)
    return tuple(held) if not held or set(held) == sums.present else None
