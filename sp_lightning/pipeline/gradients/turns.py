"""Backward passes of the processes of a machine, which add what each brings to sums that they share, in turn.

A gradient that somebody sees, by its `.grad` or by hooks, is this process's own until the sums are complete: then it is
a part of them, and the user has the sum. What was shown of a sum before is taken back when more is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import LandingBuffers
from sp_lightning.pipeline.gradients.shared_sums import SharedSums
from sp_lightning.pipeline.gradients.unit_gradients import NO_SCALING, Shipment, State, UnitGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import without_torch_function


class Turns:
    """This process's turns to add to the sums of units."""

    def __init__(
        self,
        units: Sequence[UnitGradients],
        backend: Backend,
        landing: LandingBuffers,
        processes: Processes | None,
    ) -> None:
        self._summed = [(unit, unit.sums) for unit in units if unit.sums is not None]
        self._backend = backend
        self._landing = landing
        self._processes = processes
        self._has_begun = False  # whether a pass of all processes is under way
        self._waits: list[Ticket] = []  # done when it has begun, here and in processes of higher ranks

    @property
    def is_own_pass(self) -> bool:
        """Whether the backward pass is this process's own, as in evaluation."""
        return self._processes is None or not self._processes.trains

    def begin_pass(self) -> None:
        """Begin a pass of all processes, if none is under way.

        From now on nobody reads here what earlier passes have left in the sums, so lower ranks, whose turns come first,
        may write to them. What the user still has of it is copied before.
        """
        if self._has_begun or self._processes is None:
            return
        reading: list[Ticket] = []  # of clips, which look at sums, and of passes that are not complete
        dropped: list[tuple[SharedSums, list[int]]] = []
        for unit, sums in self._summed:
            for gradient in unit.gradients:
                gradient.take_look_back()
                if gradient.host is not None and (gradient.scaling is not NO_SCALING or gradient.is_seen):
                    unit.show(gradient)
            if unit.ticket is not None:
                reading.append(unit.ticket)
            dropped.append((sums, [sums.index[each.weight] for each in unit.anew if each.weight in sums.index]))
            unit.anew = []
        self._has_begun, box = True, self._processes.box
        box.passes += 1
        number = box.passes

        def begin() -> None:
            for sums, numbers in dropped:
                sums.drop(numbers)
            box.note_begun(number)

        self._waits = [self._backend.work(begin, reading), *box.begun_by_others(number)]

    def add(self, unit: UnitGradients, sums: SharedSums, shipment: Shipment, is_over: bool, measures: bool) -> Shipment:
        """Have the thread add what is on its way when it is this process's turn, which may be over then."""
        own: list[tuple[Tensor, Tensor]] = []
        parts: dict[int, Tensor] = {}
        for gradient, arrived in zip(shipment.gradients, shipment.arrived, strict=True):
            if gradient.is_seen:
                gradient.host = torch.empty_like(gradient.weight.host)
                own.append((gradient.host, arrived))
            else:
                gradient.host = sums.places[sums.index[gradient.weight]]
                parts[sums.index[gradient.weight]] = arrived
        self._take_turn(unit, sums, own, parts, is_over, measures, shipment)
        assert unit.ticket is not None
        return Shipment(unit, shipment.gradients, [sums.places[number] for number in parts], unit.ticket, None)

    def pass_on(self, unit: UnitGradients, after: Sequence[Ticket]) -> None:
        """Let the others have their turn, and a step its way, when nothing here reads the unit's weights any more."""
        if (sums := unit.sums) is None:
            return
        sums.is_over = True
        assert unit.ticket is not None
        self._backend.work(partial(sums.pass_on, sums.number), [unit.ticket, *after])
        unit.ticket = sums.complete()

    def _take_turn(
        self,
        unit: UnitGradients,
        sums: SharedSums,
        own: Sequence[tuple[Tensor, Tensor]],
        parts: Mapping[int, Tensor],
        is_over: bool,
        measures: bool,
        shipment: Shipment | None = None,
    ) -> None:
        assert self._processes is not None
        box, everyone = self._processes.box, self._processes.count
        number, is_partial, sums.is_over = sums.number, sums.is_partial, is_over
        buffer = None if shipment is None else shipment.buffer
        to_leave = buffer if not own and sums.can_leave(parts) else None
        complete = sums.complete()
        tickets = unit.ticket, None if shipment is None else shipment.ticket

        def add() -> None:
            try:
                with without_torch_function(), torch.no_grad(), torch.inference_mode(False):
                    for target, arrived in own:
                        target.copy_(arrived)
                    if sums.begins:
                        sums.begin(number, is_partial, everyone)
                    if to_leave is None or not self._landing.may_leave_one or not sums.leave(to_leave, complete):
                        sums.add(parts, 1 / everyone)
                if is_over and sums.ends:
                    sums.measure_norms(measures)
            except BaseException as error:  # the turn will not end, so nothing that comes after it may be waited for
                box.failure = RuntimeError(f"The gradients of {unit.unit.name!r} could not be added up: {error!r}")
                raise
            if is_over:
                sums.pass_on(number)

        moved = 0 if to_leave is not None else 2 * sum(arrived.nbytes for arrived in parts.values())
        self._waits = [ticket for ticket in self._waits if not ticket.done]
        after = [sums.turn(), *self._waits, *(ticket for ticket in tickets if ticket is not None)]
        release = None if buffer is None else buffer.release
        unit.ticket = self._backend.trace.work(Kind.ADD, unit.unit.name, add, after, moved, release)
        unit.state = State.HELD

    @torch.no_grad()
    def end_pass(self, averages: bool, measures: bool) -> None:
        """End a pass of all processes: turns that are still to come in this one are taken.

        If it `averages`, the sums are complete with it, and what everybody has.
        """
        self.begin_pass()
        for unit, sums in self._summed:
            for gradient in unit.gradients:
                gradient.take_look_back()
            if not sums.is_over:
                seen = {number: weight.master.grad for weight, number in sums.index.items()} if averages else {}
                self._take_turn(unit, sums, [], {n: g for n, g in seen.items() if g is not None}, True, measures)
        for unit, sums in self._summed:
            if averages and unit.state is not State.CONSUMED:
                unit.wait()  # raises what has gone wrong here
            unit.ticket = sums.complete()
            sums.end_pass(is_partial=not averages)
        self._has_begun = False
        if not averages:
            return
        left = [(unit, sums) for unit, sums in self._summed if unit.state is not State.CONSUMED]
        for unit, _ in left:
            unit.wait()
        self._add_up_machines(measures)
        for unit, sums in left:
            present = sums.present()
            for gradient in unit.gradients:
                if gradient.weight in present:
                    unit.state = State.HELD
                    gradient.host, norm = present[gradient.weight]
                    gradient.norm = norm if measures else None
                    if gradient.is_seen:
                        unit.show(gradient)
            unit.forget([])

    def _add_up_machines(self, measures: bool) -> None:
        """Add the sums up with those of other machines, if there are any, in one process of each."""
        processes = self._processes
        if processes is None or processes.machines == 1:
            return
        if processes.box.is_keeper:
            everything = [sums for _, sums in self._summed]
            places = {name: place for sums in everything for name, place in zip(sums.names, sums.places, strict=True)}
            own = {weight.name for sums in everything for weight in sums.present()}
            names = set(processes.add_up_machines(places, own))
            for sums in everything:
                sums.note_present(names.intersection(sums.names) - own)
                sums.measure_norms(measures)
        processes.box.meet()
