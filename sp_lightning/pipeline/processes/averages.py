"""Averages of gradients over processes: devices exchange gradients, and sums land in memory that processes share.

In a backward pass of all processes each trained segment is *exchanged* once. Its gradients are packed on the device, as
they came. Each process gets its share of the gradients of all, adds it up in the order of ranks, and downloads it to
its part of the sums. Shares of several machines are added up before. So all of it crosses each link as often as if one
process were alone, and the sums are the same in every run.

All processes exchange segments in one order, that of the first one, from the last unit to the first. Units that only
some processes use come after all others. Gradients that come before their turn wait on the device, and weights that a
process does not use send zeros when its backward ends.
The optimizer may update a unit when the shares of all have landed, and no process reads its masters any more.

If code in any process sees a gradient, in its `.grad` or by hooks, each process has its own until backward has ended,
and these are averaged then, as `.grad`. Before and after a pass, each process tells the others which gradients it has.

[Note: sums that processes share]
The processes of a machine have the sums of a segment's gradients in one copy.
Gradients that come in one dtype, to masters of one dtype, are a *run*. Its elements have the same order on the device
and in the sums. Each process adds up one part of them, its *share*, which is the same part of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.gradient_memory import GradientMemory
from sp_lightning.pipeline.gradients.routes import Routes
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients, StepInBackward
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.processes.box import CounterTicket
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.weights.buffers import as_bytes, lay_out, tensor_in
from sp_lightning.pipeline.window.window import Window

_ALIGNMENT = 64  # elements; this aligns weights and shares in any dtype


class GradientRun:
    """Gradients of one dtype, to masters of one dtype, in one block of memory.

    Attributes:
        dtype: The dtype in which they are expected to come.
        sum_dtype: The dtype of their sums, which is the masters'.
        numel: The number of all elements; each process has an equal share of them.
        share: This process's share of the sums.
    """

    share: Tensor

    def __init__(self, gradients: Sequence[Gradient], processes: int) -> None:
        weight = gradients[0].weight
        self.dtype = gradients[0].expected_dtype
        self.sum_dtype = weight.dtype
        self._begins: dict[Gradient, int] = {}
        end = 0
        for gradient in gradients:
            self._begins[gradient] = end
            end += -(-gradient.weight.layout.numel() // _ALIGNMENT) * _ALIGNMENT
        self.numel = -(-end // (processes * _ALIGNMENT)) * processes * _ALIGNMENT

    def views(self, memory: Tensor, dtype: torch.dtype) -> dict[Gradient, Tensor]:
        """Return bytes of `memory` as one tensor for each gradient."""
        return {
            gradient: tensor_in(memory, begin * dtype.itemsize, gradient.weight.layout, dtype)
            for gradient, begin in self._begins.items()
        }


class SharedSums:
    """The sums of the gradients of a segment whose masters lie in shared memory.

    Attributes:
        memory: The memory of the sums.
        runs: The runs of the gradients.
        sum_of: The sum of each gradient.
        norms: The norm of each sum, where it was measured.
        brought_here: The gradients that this process has brought in this backward pass.
        brought_anywhere: The gradients that any process has brought.
        adds_to_earlier: Whether the next gradients are added to earlier sums.
        come_as_expected: Whether gradients of this pass come in the expected dtypes, in all processes.
    """

    # set as a pass of all processes begins
    adds_to_earlier: bool
    come_as_expected: bool

    def __init__(self, of_segment: SegmentGradients) -> None:
        gradients = of_segment.gradients
        masters = of_segment.segment.memory
        assert masters.shared is not None
        box = masters.shared.box
        alike: dict[tuple[torch.dtype, torch.dtype], list[Gradient]] = {}
        for gradient in gradients:
            dtypes = gradient.expected_dtype, gradient.weight.dtype
            alike.setdefault(dtypes, []).append(gradient)
        self.runs = [GradientRun(of_dtypes, box.count) for of_dtypes in alike.values()]
        sizes = [run.numel * run.sum_dtype.itemsize for run in self.runs]
        sizes.append(len(gradients) * torch.float32.itemsize)
        begins, nbytes = lay_out(sizes)
        # Its counters have, for each process, the last pass whose share has landed.
        memory = masters.get_companion("sums", nbytes, pin=True, together=True).shared
        assert memory is not None
        self.memory = memory
        spans = zip(begins, sizes, strict=True)
        *run_memories, norms = [memory.bytes[begin : begin + size] for begin, size in spans]
        self.sum_of: dict[Gradient, Tensor] = {}
        for run, run_memory in zip(self.runs, run_memories, strict=True):
            self.sum_of.update(run.views(run_memory, run.sum_dtype))
            run.share = run_memory.view(run.sum_dtype).view(box.count, -1)[box.rank]
        self.norms = dict(zip(gradients, norms.view(torch.float32).unbind(), strict=True))
        self.brought_here: list[Gradient] = []
        self.brought_anywhere: list[Gradient] = []

    # A pass of all processes has a number, which is the same in all.

    def land(self, number: int, measured: Collection[Gradient]) -> None:
        """Tell the others that this process's share has landed, and that the process no longer reads the masters.

        If it measures norms for all processes, it does so first.
        """
        for gradient in measured:
            self.norms[gradient].copy_(torch.linalg.vector_norm(self.sum_of[gradient]))
        self.memory.publish(number)

    def fail_unless_landed(self, number: int) -> None:
        """Note a failure if this process's share could not land: this process must not wait for the others' then."""
        box = self.memory.box
        if self.memory.counters[box.rank] < number:
            box.failure = RuntimeError(
                "The gradients of a unit could not be added up in this process. Another error of this "
                "process explains why."
            )


class _Exchange(NamedTuple):
    """The exchange of a run between processes that is under way."""

    run: GradientRun
    staging: GradientMemory  # the buffer that the run was sent from
    begin: int  # where the run begins in that buffer
    everyones: Tensor  # the parts of this process's share, one from each process
    work: Any  # torch's handle to the exchange


class Averages:
    """Averages the gradients of segments, one after the other."""

    def __init__(
        self,
        by_segment: Sequence[SegmentGradients],
        window: Window,
        routes: Routes,
        processes: Processes,
    ) -> None:
        # Gradients of resident weights are complete only when backward ends.
        in_order = sorted(by_segment, key=lambda of_segment: (of_segment.unit.resident, -of_segment.unit.index))
        self._by_name = {of_segment.segment.weights[0].name: of_segment for of_segment in in_order}
        self._window = window
        self._routes = routes
        routes.staging.buffer_count *= 2  # as many buffers receive as send
        self._processes = processes
        # The sums of each segment, made in all processes when its first gradients come.
        self._sums: dict[SegmentGradients, SharedSums] = {}
        self.has_begun = False  # whether a pass of all processes is under way
        # Segments to be exchanged in this pass, in order.
        self._to_come: dict[SegmentGradients, SharedSums] = {}
        # Segments that are complete, and wait for their turn.
        self._ready: set[SegmentGradients] = set()
        # Segments that were exchanged in this pass.
        self._exchanged: dict[SegmentGradients, SharedSums] = {}
        # The exchanges of the last one, until they are finished.
        self._exchanges: list[_Exchange] = []
        # The copies of a segment's shares to the host, until the segment was passed on.
        self._landing: dict[SegmentGradients, list[Ticket]] = {}

    # ------------------------------------------------------------------------------------------ in a backward pass

    def awaits(self, gradient: Gradient) -> bool:
        """Tell whether a gradient will be exchanged with its segment; begin a pass if none is under way.

        Raises:
            RuntimeError: The segment has been exchanged, or its gradients cannot be added up in their dtype.
        """
        self.begin_pass()
        of_segment = gradient.of_segment
        sums = self._to_come.get(of_segment)
        travels_as_it_came = sums is not None and sums.come_as_expected and gradient.weight.lowered
        if of_segment in self._exchanged or (travels_as_it_came and gradient in of_segment.gathered):
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a second gradient in this backward pass, "
                "after the processes had added up the first. Set `use_reentrant=False` for "
                "checkpoints around its module."
            )
        return sums is not None

    def begin_pass(self) -> None:
        """Begin a pass of all processes, unless one is under way, or this process runs backward alone.

        Units that only some use come last: no process waits in backward for what another sends when its own ends.
        """
        if self.has_begun or not self._processes.trains:
            return
        self.has_begun = True
        self._processes.passes += 1
        own_state = {
            name: (
                self._names_in_sums(of_segment),
                self._come_as_expected(of_segment),
                of_segment.unit.readers.are_in_graphs,
            )
            for name, of_segment in self._by_name.items()
        }
        everyones = self._processes.gather_in_step(own_state)
        for name in sorted(everyones[0], key=lambda name: len({state[name][2] for state in everyones})):
            of_segment = self._by_name[name]
            names_in_sums = own_state[name][0]
            if names_in_sums is None or any(state[name][0] != names_in_sums for state in everyones):
                of_segment.show()
                continue
            sums = self._sums.get(of_segment)
            if sums is None:
                sums = self._sums[of_segment] = SharedSums(of_segment)
                for run in sums.runs:
                    self._routes.landing.make_room(run.share.nbytes)
            sums.adds_to_earlier = bool(names_in_sums)
            sums.come_as_expected = all(state[name][1] for state in everyones)
            self._to_come[of_segment] = sums

    def _names_in_sums(self, of_segment: SegmentGradients) -> list[str] | None:
        """Return the names of weights with earlier gradients in the sums; None if the next ones cannot be added."""
        of_segment.wait()  # other processes are about to write to sums that a clip reads here
        of_segment.expect()
        stored = of_segment.stored_tensors
        sums = self._sums.get(of_segment)
        for gradient, tensor in stored.items():
            if sums is None or tensor is not sums.sum_of[gradient] or gradient.factors:
                return None
        accumulates_in_grad = any(gradient.accumulates_in_grad for gradient in of_segment.gradients)
        is_part = sums is not None and list(stored) not in ([], sums.brought_anywhere)
        if accumulates_in_grad or is_part or not of_segment.trained:
            return None
        return [gradient.weight.name for gradient in stored]

    def _come_as_expected(self, of_segment: SegmentGradients) -> bool:
        """Tell whether gradients come in the expected dtypes: an earlier pass has shown how each weight is used.

        A forward shows it, too, but not how a reentrant checkpoint uses weights in backward.
        """
        for gradient in of_segment.trained:
            weight = gradient.weight
            if gradient.expected_dtype is weight.dtype:
                continue
            if weight.name not in self._processes.trained_names or weight.twins_in_graphs:
                return False
            if weight.compute_dtype is not gradient.expected_dtype:
                return False
        return True

    def send(self, of_segment: SegmentGradients, is_final: bool, early: StepInBackward | None) -> bool:
        """Exchange a segment's gradients when its turn comes, if they are complete; tell whether it is exchanged.

        They are complete if all have come, and they are final. If some are missing, they are complete when no node has
        any of the weights: none has saved one, and no call is to come. (A call saves none if its inputs require no
        gradient.) The step in backward uses gradients that were exchanged.
        """
        if of_segment not in self._to_come:
            self._finish_exchanges(early)  # both use the same staging buffers
            return False
        if of_segment.missing:
            is_final = not of_segment.unit.readers.are_in_graphs
        if is_final:
            self._ready.add(of_segment)
        self._exchange_ready(early)
        return True

    def send_rest(self, early: StepInBackward | None = None) -> None:
        """Exchange the remaining segments, as backward has ended."""
        self._ready.update(self._to_come)
        self._exchange_ready(early)
        self._finish_exchanges(early)

    def _exchange_ready(self, early: StepInBackward | None) -> None:
        for of_segment in list(self._to_come):
            if of_segment not in self._ready:
                break
            self._finish_exchanges(early)
            self._ready.remove(of_segment)
            sums = self._to_come.pop(of_segment)
            self._exchanged[of_segment] = sums
            # An optimizer's step may still read the sums.
            self._window.finish_optimizer(of_segment.unit)
            gathered = of_segment.take_gathered()
            sums.brought_here = list(gathered)
            self._send(sums, gathered)

    @torch.no_grad()
    def _send(self, sums: SharedSums, gathered: Mapping[Gradient, Tensor]) -> None:
        dtypes = [run.dtype if sums.come_as_expected else run.sum_dtype for run in sums.runs]
        # A share of the sums is sent from that buffer, too.
        sizes = [
            max(run.numel * dtype.itemsize, run.share.nbytes)
            for run, dtype in zip(sums.runs, dtypes, strict=True)
        ]  # fmt: skip
        staging = self._routes.staging.take(sum(sizes))
        received = self._routes.staging.take(sum(sizes))
        begin = 0
        for run, dtype, size in zip(sums.runs, dtypes, sizes, strict=True):
            end = begin + run.numel * dtype.itemsize
            sent_bytes, received_bytes = staging.bytes[begin:end], received.bytes[begin:end]
            packed = run.views(sent_bytes, dtype)
            brought = [gradient for gradient in packed if gradient in gathered]
            if len(brought) < len(packed):
                sent_bytes.zero_()
            if brought:
                targets = [packed[gradient] for gradient in brought]
                torch._foreach_copy_(targets, [gathered[gradient] for gradient in brought])
            # They are sent as bytes: groups cannot send every dtype.
            group = self._processes.machine_group
            work = dist.all_to_all_single(received_bytes, sent_bytes, group=group, async_op=True)
            everyones = received_bytes.view(dtype).view(self._processes.box.count, -1)
            self._exchanges.append(_Exchange(run, staging, begin, everyones, work))
            begin += size

    def _finish_exchanges(self, early: StepInBackward | None) -> None:
        """Wait for exchanges, add shares up, and give complete gradients to the step in backward."""
        if not self._exchanges:
            return
        exchanges = self._exchanges
        self._exchanges = []
        of_segment, sums = list(self._exchanged.items())[-1]
        self._landing[of_segment] = [self._download(of_segment, exchange) for exchange in exchanges]
        for gradient in sums.brought_here:
            gradient.set_tensor(sums.sum_of[gradient])
        is_whole = of_segment.stored_tensors.keys() >= set(of_segment.trained)
        if early is not None and is_whole and early.wants(of_segment):
            early.step_with(of_segment)

    @torch.no_grad()
    def _download(self, of_segment: SegmentGradients, exchange: _Exchange) -> Ticket:
        """Add up this process's share of a run, and bring it to the sums."""
        run, staging, begin, everyones, work = exchange
        processes = self._processes
        with processes.box.failures_explained():
            work.wait()
        dtype = torch.promote_types(run.sum_dtype, torch.float32)
        total = torch.zeros_like(everyones[0], dtype=dtype)
        for part in everyones:
            total.add_(part, alpha=1 / processes.count)
        if processes.machines > 1:
            dist.all_reduce(total, group=processes.cross_machine_group)
        nbytes = run.share.nbytes
        # The gradients in this buffer were sent. Nothing else is written there while the copy below reads it.
        staging.bytes[begin : begin + nbytes].view(run.sum_dtype).copy_(total)
        if not self._exchanged[of_segment].adds_to_earlier:
            return self._routes.download_part(of_segment, as_bytes(run.share), staging, begin)
        buffer = self._routes.landing.take(nbytes)
        landed = buffer.bytes[:nbytes]
        ticket = self._routes.download_part(of_segment, landed, staging, begin)
        action = partial(add, run.share, landed.view(run.sum_dtype))
        addition = Job(action, [ticket], 2 * nbytes, buffer.release)
        return self._window.backend.trace.work(Kind.ADD, of_segment.unit.name, addition)

    def pass_on(self, of_segment: SegmentGradients, after: Iterable[Ticket] = ()) -> None:
        """Tell the others, when this process's sums have landed, that the unit may be updated."""
        sums, backend = self._exchanged[of_segment], self._window.backend
        number, box, counters = self._processes.passes, self._processes.box, sums.memory.counters
        tickets = [*self._landing.pop(of_segment), *after]
        measured: Collection[Gradient] = ()
        # the keeper measures norms for all processes
        if self._routes.measures_norms and box.is_keeper:
            measured = sums.brought_anywhere
            # norms are measured over all shares
            tickets.append(CounterTicket(box, counters[1:], number))
        land = partial(sums.land, number, measured)
        own_share = backend.work(Job(land, tickets, cleanup=partial(sums.fail_unless_landed, number)))
        # This process's own error is raised first, and not as if the others were late.
        all_shares = CounterTicket(box, counters, number)
        of_segment.ticket = backend.work(Job(after=[own_share, all_shares]))

    # -------------------------------------------------------------------------------------------- when it has ended

    def end_pass(self, named: Mapping[str, nn.Parameter]) -> None:
        """End a pass of all processes, and average the `.grad` of other parameters, which are given by name.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if not self._processes.trains:
            return
        self.begin_pass()
        self.send_rest()
        others = dict(named)
        for of_segment in self._by_name.values():
            if of_segment not in self._exchanged:
                of_segment.show()
                others.update({weight.name: weight.master for weight in of_segment.segment.weights})
        gradients = {name: other.grad for name, other in others.items() if other.grad is not None}
        is_sparse = any(gradient.layout is not torch.strided for gradient in gradients.values())
        exchanged = self._exchanged.values()
        brought = [gradient.weight.name for sums in exchanged for gradient in sums.brought_here]
        everyones = self._processes.gather_in_step((brought, list(gradients), is_sparse))
        everyones_brought, names, are_sparse = zip(*everyones, strict=True)
        self._adopt(set().union(*everyones_brought))
        known = self._processes.trained_names
        before = len(known)
        known.update(*everyones_brought, *names)
        if len(known) > before:
            # Its buffers were as large as gradients in the masters' dtypes.
            self._routes.staging.release()
        if any(are_sparse):
            raise RuntimeError(
                "Sparse gradients are not averaged over processes. Set `sparse=False` in the "
                "layer, or train on one device."
            )
        if self._processes.averages:
            self._processes.average(others[name] for name in sorted(set().union(*names)))

    def _adopt(self, brought: Collection[str]) -> None:
        """Make the sums the gradients of units that were not stepped in backward; `brought` are names of weights."""
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
        self.has_begun = False

    def abandon_pass(self) -> None:
        """Wait for no other process any more if an exception has ended a pass; the others notice that this one ends.

        The next pass raises an error: the others may have finished the one that has failed here.
        """
        if self.has_begun:
            self.has_begun = False
            self._to_come = {}
            self._exchanged = {}
            self._processes.box.failure = RuntimeError(
                "A backward pass of all processes ended with an exception in this one. They cannot train on together."
            )
