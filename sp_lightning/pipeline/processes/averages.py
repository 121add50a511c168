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
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.routes import Routes
from sp_lightning.pipeline.gradients.segment_gradients import (
    Gradient,
    GradientMemory,
    SegmentGradients,
    StepInBackward,
)  # fmt: skip
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.processes.box import CounterTicket
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.processes.sums import GradientRun, SharedSums
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.window.window import Window


class _Exchange(NamedTuple):
    """A run that goes round."""

    run: GradientRun
    staging: GradientMemory  # the buffer that it was sent from, and where it begins there
    begin: int
    everyones: Tensor  # this process's share of what each has sent
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
        # what is resident is complete when backward ends
        in_order = sorted(by_segment, key=lambda each: (each.unit.resident, -each.unit.index))
        self._by_name = {each.segment.weights[0].name: each for each in in_order}
        self._window = window
        self._routes = routes
        routes.staging.buffer_count *= 2  # for what comes as many as for what leaves
        self._processes = processes
        # made in all processes as the first gradients come
        self._sums: dict[SegmentGradients, SharedSums] = {}
        self._has_begun = False  # whether a pass of all processes is under way
        self._to_come: dict[SegmentGradients, SharedSums] = {}  # of this pass, in order
        self._ready: set[SegmentGradients] = set()
        self._exchanged: dict[SegmentGradients, SharedSums] = {}
        self._exchanges: list[_Exchange] = []  # of the segment that was exchanged last
        # the copies of a segment's shares to the host, until it was passed on
        self._landing: dict[SegmentGradients, list[Ticket]] = {}

    # ------------------------------------------------------------------------------------------ in a backward pass

    def awaits(self, gradient: Gradient) -> bool:
        """Tell whether a gradient that has come is to be exchanged with others of its segment; it may begin a pass.

        Raises:
            RuntimeError: These have been exchanged, or cannot have a sum in the dtype in which they are.
        """
        self._begin_pass()
        of_segment = gradient.of_segment
        sums = self._to_come.get(of_segment)
        travels_as_it_came = sums is not None and sums.come_as_expected and gradient.weight.lowered
        if of_segment in self._exchanged or (travels_as_it_came and gradient in of_segment.gathered):
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a second gradient in this backward pass, when "
                "the processes had added up the first. Let checkpoints around its "
                "module have `use_reentrant=False`."
            )
        return sums is not None

    def _begin_pass(self) -> None:
        """Begin a pass of all processes, if none is under way, and this is none of this process's own."""
        if self._has_begun or not self._processes.trains:
            return
        self._has_begun = True  # whatever happens, nobody is asked twice
        self._processes.passes += 1
        own = {name: (self._names_in_sums(each), self._come_as_expected(each)) for name, each in self._by_name.items()}
        everyones = self._processes.gather_in_step(own)
        for name in everyones[0]:
            of_segment = self._by_name[name]
            held, *others = (each[name][0] for each in (own, *everyones))
            if held is None or any(each != held for each in others):
                of_segment.show()
                continue
            sums = self._sums.get(of_segment)
            if sums is None:
                sums = self._sums[of_segment] = SharedSums(of_segment)
                for run in sums.runs:
                    self._routes.landing.make_room(run.share.nbytes)
            sums.adds_to_earlier = bool(held)
            sums.come_as_expected = all(each[name][1] for each in everyones)
            self._to_come[of_segment] = sums

    def _names_in_sums(self, of_segment: SegmentGradients) -> list[str] | None:
        """Return the names of weights whose sums this process has; None if not all gradients can be added to these."""
        of_segment.wait()  # others are about to write to sums that a clip reads here
        of_segment.expect()
        held = of_segment.stored_gradients
        sums = self._sums.get(of_segment)
        for gradient in held:
            if sums is None or gradient.tensor is not sums.sum_of[gradient] or gradient.factors:
                return None
        is_seen = any(gradient.is_seen for gradient in of_segment.gradients)
        is_part = sums is not None and held not in ([], sums.brought_anywhere)
        if is_seen or is_part or not of_segment.trained:
            return None
        return [gradient.weight.name for gradient in held]

    def _come_as_expected(self, of_segment: SegmentGradients) -> bool:
        """Tell whether gradients come in the expected dtypes: some pass before has shown how each weight is used.

        A forward shows it, too, but not what a reentrant checkpoint runs in backward.
        """
        lowered = [each for each in of_segment.trained if each.expected_dtype is not each.weight.dtype]
        return all(
            each.weight.name in self._processes.trained_names
            and each.weight.compute_dtype is each.expected_dtype
            and not each.weight.other_twins
            for each in lowered
        )

    def send(self, of_segment: SegmentGradients, is_final: bool, early: StepInBackward | None) -> bool:
        """Exchange what a segment has gathered when its turn comes, if that is all; tell whether it is exchanged.

        It is all if it `is_final` and complete, or if no node has any of the weights whose gradients are missing: none
        has saved one, nor is any call to come, which saves none where what it is given requires no gradient.
        An early step uses what has come round.
        """
        if of_segment not in self._to_come:
            self._finish_exchanges(early)  # it lies in the same staging buffers
            return False
        unit = of_segment.unit
        if is_final if not of_segment.missing else not (unit.handles or unit.calls_to_come):
            self._ready.add(of_segment)
        self._exchange_ready(early)
        return True

    def send_rest(self, early: StepInBackward | None = None) -> None:
        """Exchange the rest, as backward has ended."""
        self._ready.update(self._to_come)
        self._exchange_ready(early)
        self._finish_exchanges(early)

    def _exchange_ready(self, early: StepInBackward | None) -> None:
        while self._to_come and (of_segment := next(iter(self._to_come))) in self._ready:
            self._finish_exchanges(early)
            self._ready.remove(of_segment)
            sums = self._exchanged[of_segment] = self._to_come.pop(of_segment)
            # it may still read the sums
            self._window.finish_optimizer(of_segment.unit)
            gathered = of_segment.take_gathered()
            sums.brought_here = list(gathered)
            self._send(sums, gathered)

    @torch.no_grad()
    def _send(self, sums: SharedSums, gathered: Mapping[Gradient, Tensor]) -> None:
        dtypes = [run.dtype if sums.come_as_expected else run.sum_dtype for run in sums.runs]
        # a share of the sums leaves from there, too
        sizes = [
            max(run.numel * dtype.itemsize, run.share.nbytes)
            for run, dtype in zip(sums.runs, dtypes, strict=True)
        ]  # fmt: skip
        staging, received = (self._routes.staging.take(sum(sizes)) for _ in range(2))
        begin = 0
        for run, dtype, size in zip(sums.runs, dtypes, sizes, strict=True):
            end = begin + run.numel * dtype.itemsize
            sent, come = staging.bytes[begin:end], received.bytes[begin:end]
            places = run.views(sent, dtype)
            brought = [gradient for gradient in places if gradient in gathered]
            if len(brought) < len(places):
                sent.zero_()
            if brought:
                torch._foreach_copy_([places[each] for each in brought], [gathered[each] for each in brought])
            # as bytes: groups cannot send every dtype
            work = dist.all_to_all_single(come, sent, group=self._processes.machine_group, async_op=True)
            everyones = come.view(dtype).view(self._processes.box.count, -1)
            self._exchanges.append(_Exchange(run, staging, begin, everyones, work))
            begin += size

    def _finish_exchanges(self, early: StepInBackward | None) -> None:
        """Wait for what goes round, add shares up, and have an early step use what is complete."""
        if not self._exchanges:
            return
        going_round = self._exchanges
        self._exchanges = []
        of_segment, sums = list(self._exchanged.items())[-1]
        self._landing[of_segment] = [self._download(of_segment, each) for each in going_round]
        for gradient in sums.brought_here:
            gradient.set_tensor(sums.sum_of[gradient])
        is_whole = set(of_segment.stored_gradients).issuperset(of_segment.trained)
        if early is not None and is_whole and early.wants(of_segment):
            early.step_with(of_segment)

    @torch.no_grad()
    def _download(self, of_segment: SegmentGradients, each: _Exchange) -> Ticket:
        """Add up this process's share of a run, and bring it to the sums."""
        run, processes = each.run, self._processes
        each.work.wait()
        dtype = torch.promote_types(run.sum_dtype, torch.float32)
        total = torch.zeros_like(each.everyones[0], dtype=dtype)
        for part in each.everyones:
            total.add_(part, alpha=1 / processes.count)
        if processes.machines > 1:
            dist.all_reduce(total, group=processes.cross_machine_group)
        nbytes = run.share.nbytes
        # what was sent has left; a copy may read this as long as it takes
        each.staging.bytes[each.begin : each.begin + nbytes].view(run.sum_dtype).copy_(total)
        if not self._exchanged[of_segment].adds_to_earlier:
            return self._routes.download_part(of_segment, as_bytes(run.share), each.staging, each.begin)
        buffer = self._routes.landing.take(nbytes)
        landed = buffer.bytes[:nbytes]
        ticket = self._routes.download_part(of_segment, landed, each.staging, each.begin)
        job = partial(add, run.share, landed.view(run.sum_dtype))
        trace = self._window.backend.trace
        return trace.work(Kind.ADD, of_segment.unit.name, Job(job, [ticket], 2 * nbytes, buffer.release))

    def pass_on(self, of_segment: SegmentGradients, after: Iterable[Ticket] = ()) -> None:
        """Tell others that a unit may be stepped when its sums have landed, as far as this process is concerned."""
        sums, backend = self._exchanged[of_segment], self._window.backend
        number, box, counters = self._processes.passes, self._processes.box, sums.memory.counters
        tickets = [*self._landing.pop(of_segment), *after]
        measured: Collection[Gradient] = ()
        if self._routes.measures_norms and box.is_keeper:  # once for all processes
            measured = sums.brought_anywhere
            tickets.append(CounterTicket(box, counters[1:], number))  # of the others
        land = partial(sums.land, number, measured)
        own = backend.work(Job(land, tickets, cleanup=partial(sums.fail_unless_landed, number)))
        # an error of its own is raised, and not waited for as if others were late
        of_segment.set_ticket(backend.work(Job(after=[own, CounterTicket(box, counters, number)])))

    # -------------------------------------------------------------------------------------------- when it has ended

    def end_pass(self, named: Mapping[str, nn.Parameter]) -> None:
        """End a pass of all processes; the gradients of other parameters, by their names, are averaged with it.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if not self._processes.trains:
            return
        self._begin_pass()
        self.send_rest()
        others = dict(named)
        for of_segment in self._by_name.values():
            if of_segment not in self._exchanged:
                of_segment.show()
                others.update({weight.name: weight.master for weight in of_segment.segment.weights})
        gradients = {name: each.grad for name, each in others.items() if each.grad is not None}
        is_sparse = any(gradient.layout is not torch.strided for gradient in gradients.values())
        brought = [each.weight.name for sums in self._exchanged.values() for each in sums.brought_here]
        everyones = self._processes.gather_in_step((brought, list(gradients), is_sparse))
        everyones_brought, names, are_sparse = zip(*everyones, strict=True)
        self._adopt(set().union(*everyones_brought))
        known = self._processes.trained_names
        before = len(known)
        known.update(*everyones_brought, *names)
        if len(known) > before:
            self._routes.staging.release()  # which is as large as masters' dtypes took
        if any(are_sparse):
            raise RuntimeError(
                "Sparse gradients are not averaged over processes. Let the layer have "
                "`sparse=False`, or train it on one device."
            )
        if self._processes.averages:
            self._processes.average(others[name] for name in sorted(set().union(*names)))

    def _adopt(self, brought: Collection[str] = ()) -> None:
        """Take the sums for gradients that some process has `brought`, of units that were not stepped with them."""
        measures_norms = self._routes.measures_norms
        for of_segment in list(self._landing):
            sums = self._exchanged[of_segment]
            sums.brought_anywhere = [
                gradient for gradient in of_segment.gradients
                if gradient.tensor is not None or gradient.weight.name in brought
            ]  # fmt: skip
            self.pass_on(of_segment)
            for gradient in sums.brought_anywhere:
                norm = sums.norms[gradient] if measures_norms else None
                gradient.set_tensor(sums.sum_of[gradient], norm)
        self._exchanged = {}
        self._has_begun = False

    def abandon_pass(self) -> None:
        """Have others not wait for this process's part of a pass that an exception has ended."""
        # its error was raised already, or is due to the exception
        with contextlib.suppress(Exception):
            self._begin_pass()
            self.send_rest()
            self._adopt()
