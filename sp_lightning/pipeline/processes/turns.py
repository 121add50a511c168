"""Backward passes of the processes of a machine, which add what each brings to sums that they share, in turn.

A gradient that somebody sees, by its `.grad` or by hooks, is this process's own until the sums are complete: then it is
a part of them, and the user has the sum. What was shown of a sum before is taken back when more is added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.gradients.routes import LandingBuffer, Shipment
from sp_lightning.pipeline.gradients.segment_gradients import NO_SCALING, Gradient, SegmentGradients, State
from sp_lightning.pipeline.gradients.stream import Exchange
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.processes.sums import SharedSums, check_part
from sp_lightning.pipeline.torch_private import without_torch_function


@dataclass(eq=False)
class _Turn:
    """A job: this process's turn to add to the sums of a unit."""

    of_segment: SegmentGradients
    sums: SharedSums
    # gradients that somebody sees here: where they go, and where they land
    own: Sequence[tuple[Tensor, Tensor]]
    parts: Mapping[int, Tensor]  # the others, by the numbers of their weights
    buffer: LandingBuffer | None  # that they have landed in
    is_over: bool  # whether the turn ends with it
    measures_norms: bool

    def __post_init__(self) -> None:
        # the pass as it is now: the thread may come to it when it has ended here
        self._number = self.sums.number
        self._is_partial = self.sums.is_partial

    def __call__(self) -> None:
        try:
            with without_torch_function(), torch.no_grad(), torch.inference_mode(False):
                self._add()
        except BaseException as error:
            # the turn will not end, so nothing that comes after it may be waited for
            name = self.of_segment.unit.name
            words = f"The gradients of {name!r} could not be added up: {error!r}"
            self.sums.box.failure = RuntimeError(words)
            raise
        if self.is_over:
            self.sums.pass_on(self._number)

    def _add(self) -> None:
        sums = self.sums
        for target, landed in self.own:
            target.copy_(landed)
        if sums.box.is_keeper:
            sums.begin(self._number, self._is_partial)
        sums.add(self.parts)
        if self.is_over and sums.box.is_last:
            sums.measure_norms(self.measures_norms)


class Turns(Exchange):
    """This process's turns to add to the sums of units."""

    def __init__(
        self,
        by_segment: Sequence[SegmentGradients],
        backend: Backend,
        processes: Processes,
        is_summed: bool,
    ) -> None:
        self._by_segment = by_segment
        self._backend = backend
        self._processes = processes
        self._is_summed = is_summed
        self._has_begun = False  # whether a pass of all processes is under way
        # done when it has begun, here and in processes of higher ranks
        self._waits: list[Ticket] = []
        # what the user was shown of sums that are not complete
        self._looks: dict[Gradient, Tensor] = {}
        self._sums: dict[SegmentGradients, SharedSums] = {}
        for of_segment in by_segment:
            segment = of_segment.segment
            if is_summed and segment.weights[0].master.requires_grad:
                self._sums[of_segment] = SharedSums(segment.weights, segment.memory, processes.count)
                self._take_up(of_segment, self._sums[of_segment])

    def _take_up(self, of_segment: SegmentGradients, sums: SharedSums) -> None:
        """Take up sums where an earlier arrangement has left them."""
        present = sums.present() if sums.is_partial else {}
        for gradient in of_segment.gradients:
            if not sums.is_partial:
                sums.forget(gradient.weight)
            elif gradient.weight in present:
                gradient.tensor, _ = present[gradient.weight]
                of_segment.hold()

    # ------------------------------------------------------------------------------------------ in a backward pass

    @override
    def begin_pass(self) -> None:
        """Begin a pass of all processes, if none is under way, and this is none of this process's own.

        From now on nobody reads here what earlier passes have left in the sums, so lower ranks, whose turns come first,
        may write to them. What the user still has of it is copied before.
        """
        self._take_looks_back()
        if self._has_begun or not self._processes.trains:
            return
        # of clips, which look at sums, and of passes that are not complete
        reading: list[Ticket] = []
        dropped: list[tuple[SharedSums, list[int]]] = []
        for of_segment, sums in self._sums.items():
            for gradient in of_segment.gradients:
                is_the_users = gradient.scaling is not NO_SCALING or gradient.is_seen
                if gradient.tensor is not None and is_the_users:
                    self.show(gradient)
            if of_segment.ticket is not None:
                reading.append(of_segment.ticket)
            dropped.append((sums, sums.take_forgotten()))
        self._has_begun = True
        box = self._processes.box
        box.passes += 1
        number = box.passes

        def begin() -> None:
            for sums, numbers in dropped:
                sums.drop(numbers)
            box.note_begun(number)

        self._waits = [self._backend.work(begin, reading), *box.begun_by_others(number)]

    @override
    def adds_up(self, shipment: Shipment) -> bool:
        sums = self._sums.get(shipment.of_segment)
        for gradient in shipment.gradients:
            if self._processes.trains:
                check_part(gradient.weight, sums)
            elif sums is not None and gradient.tensor is not None and sums.has(gradient.tensor):
                raise RuntimeError(
                    f"Weight {gradient.weight.name!r} got a gradient in an evaluation step, while "
                    "those of a training step are added up. Take it by `torch.autograd.grad`."
                )
        return self._processes.trains

    @override
    def add(self, shipment: Shipment, is_over: bool, measures_norms: bool) -> None:
        of_segment = shipment.of_segment
        sums = self._sums[of_segment]
        own: list[tuple[Tensor, Tensor]] = []
        parts: dict[int, Tensor] = {}
        for gradient, landed in zip(shipment.gradients, shipment.tensors, strict=True):
            number = sums.index[gradient.weight]
            if gradient.is_seen:
                gradient.tensor = torch.empty_like(gradient.weight.host)
                own.append((gradient.tensor, landed))
            else:
                gradient.tensor = sums.places[number]
                parts[number] = landed
        turn = _Turn(of_segment, sums, own, parts, shipment.buffer, is_over, measures_norms)
        shipment.ticket = self._take(turn, shipment.ticket)
        shipment.tensors = [sums.places[number] for number in parts]
        shipment.buffer = None

    @override
    def pass_on(self, of_segment: SegmentGradients, after: Sequence[Ticket]) -> bool:
        sums = self._sums.get(of_segment)
        if sums is None:
            return False
        sums.is_over = True
        assert of_segment.ticket is not None
        self._backend.work(partial(sums.pass_on, sums.number), [of_segment.ticket, *after])
        of_segment.ticket = sums.complete()
        return True

    def _take(self, turn: _Turn, landed: Ticket | None = None) -> Ticket:
        """Have the thread take a turn when it comes, and the gradients have landed."""
        of_segment = turn.of_segment
        turn.sums.is_over = turn.is_over
        self._waits = [ticket for ticket in self._waits if not ticket.done]
        earlier = [ticket for ticket in (of_segment.ticket, landed) if ticket is not None]
        moved = 2 * sum(part.nbytes for part in turn.parts.values())
        release = None if turn.buffer is None else turn.buffer.release
        after = [turn.sums.turn(), *self._waits, *earlier]
        trace = self._backend.trace
        ticket = trace.work(Kind.ADD, of_segment.unit.name, turn, after, moved, release)
        of_segment.ticket = ticket
        return ticket

    @override
    @torch.no_grad()
    def end_pass(self, averages: bool, measures_norms: bool) -> None:
        """End a pass of all processes: turns that are still to come in this one are taken.

        If it `averages`, the sums are complete with it, and what everybody has.
        """
        self.begin_pass()
        for of_segment, sums in self._sums.items():
            if not sums.is_over:
                # what the user has as `.grad` is one when the sums are complete
                parts: dict[int, Tensor] = {}
                for weight, number in sums.index.items() if averages else ():
                    if weight.master.grad is not None:
                        parts[number] = weight.master.grad
                turn = _Turn(of_segment, sums, [], parts, None, True, measures_norms)
                self._take(turn)
        for of_segment, sums in self._sums.items():
            if averages and of_segment.state is not State.CONSUMED:
                of_segment.wait()  # raises what has gone wrong here
            of_segment.ticket = sums.complete()
            sums.end_pass(is_partial=not averages)
        self._has_begun = False
        if averages:
            self._adopt_sums(measures_norms)

    def _adopt_sums(self, measures_norms: bool) -> None:
        """Take the sums, which are complete, for the gradients of units that were not stepped with them."""
        waiting: dict[SegmentGradients, SharedSums] = {}
        for of_segment, sums in self._sums.items():
            if of_segment.state is not State.CONSUMED:
                waiting[of_segment] = sums
                of_segment.wait()
        self._add_up_machines(measures_norms)
        for of_segment, sums in waiting.items():
            present = sums.present()
            for gradient in of_segment.gradients:
                if gradient.weight not in present:
                    continue
                of_segment.hold()
                gradient.tensor, norm = present[gradient.weight]
                gradient.norm = norm if measures_norms else None
                if gradient.is_seen:
                    self.show(gradient)
            of_segment.note_dropped()

    def _add_up_machines(self, measures_norms: bool) -> None:
        """Add the sums up with those of other machines, if there are any, in one process of each."""
        processes = self._processes
        if processes.machines == 1:
            return
        if processes.box.is_keeper:
            places: dict[str, Tensor] = {}
            own: set[str] = set()
            for sums in self._sums.values():
                places.update(zip(sums.names, sums.places, strict=True))
                own.update(weight.name for weight in sums.present())
            names = set(processes.add_up_machines(places, own))
            for sums in self._sums.values():
                sums.note_present(names.intersection(sums.names) - own)
                sums.measure_norms(measures_norms)
        processes.box.meet()

    @override
    def abandon_pass(self) -> None:
        if self._processes.trains:
            self.end_pass(averages=False, measures_norms=False)

    # ------------------------------------------------------------------- between one backward pass and the next

    @property
    @override
    def lacks_sums(self) -> bool:
        if not self._is_summed:
            return False
        for of_segment in self._by_segment:
            sums = self._sums.get(of_segment)
            for weight in of_segment.segment.weights:
                if weight.master.requires_grad and (sums is None or weight not in sums.index):
                    return True
        return False

    @override
    def show(self, gradient: Gradient) -> None:
        """Show a gradient; of a sum that is not complete, a copy to look at."""
        if gradient in self._looks:
            return
        if gradient.tensor is None or gradient.is_seen or not self._is_partial(gradient.of_segment):
            super().show(gradient)
            return
        gradient.of_segment.wait()
        with torch.inference_mode(False), torch.no_grad():
            look = gradient.tensor.clone(memory_format=torch.preserve_format)
        self._looks[gradient] = look
        gradient.weight.master.grad = look

    @override
    def show_all(self, gradients: Iterable[Gradient]) -> None:
        """Show gradients, but for parts of sums, which another arrangement takes up."""
        self._take_looks_back()
        for gradient in gradients:
            if not self._is_partial(gradient.of_segment):
                self.show(gradient)

    @override
    def drop(self, gradients: Collection[Gradient]) -> None:
        for gradient in gradients:
            sums = self._sums.get(gradient.of_segment)
            # not what somebody sees, and this process alone has
            if sums is not None and (gradient.tensor is None or sums.has(gradient.tensor)):
                sums.forget(gradient.weight)
        super().drop(gradients)

    def _is_partial(self, of_segment: SegmentGradients) -> bool:
        """Tell whether more is added to the sums of a unit before they are complete."""
        return of_segment in self._sums and self._sums[of_segment].is_partial

    def _take_looks_back(self) -> None:
        """Take back what was shown of sums that are not complete.

        Raises:
            RuntimeError: It was changed.
        """
        while self._looks:
            gradient, look = self._looks.popitem()
            master = gradient.weight.master
            if master.grad is None:
                continue
            if master.grad is not look or look._version:
                raise RuntimeError(
                    f"The gradient of weight {gradient.weight.name!r} was changed before the last "
                    "micro-batch of a step, while the processes of this machine add it up. Change "
                    "it after that."
                )
            master.grad = None
