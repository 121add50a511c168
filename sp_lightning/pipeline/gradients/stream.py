"""The stream of gradients from the twins on the device to the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy, in the dtype they were computed in.

    device                        on its way                  host
    leaf.grad -> staging buffer ----------------------------> the unit's own buffer        (first of a step)
                      -----------------> landing buffer ---> added to what is there       (accumulation)
                      -----------------> landing buffer ---> the optimizer                (it steps in backward)

When backward ends, the last gradients may still be on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded as long as the engine has gradients that nobody has asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_lightning.optim.passes import add
from sp_lightning.pipeline.gradients.buffers import GradientMemory, LandingBuffers, StagingBuffers
from sp_lightning.pipeline.gradients.turns import Turns
from sp_lightning.pipeline.gradients.unit_gradients import NO_SCALING, Gradient, Shipment, State, UnitGradients, refusal
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.operands import run_hooks
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import post_accumulate_hooks, tensor_hooks, without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.gradient_layout import GradientLayout
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window

if TYPE_CHECKING:
    from sp_lightning.pipeline.optimizer.group_steps import EarlyStep


class GradientStream:
    """Brings gradients to the host, and has them there until somebody asks for them or a step has used them.

    Attributes:
        of: The gradient of each weight.
        arrived: What the backward that is running has brought, in autograd's order: nobody can read it yet. The value
            tells whether the engine had nothing of it before.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        window: Window,
        landing: LandingBuffers,
        processes: Processes | None,
        is_summed: bool,
    ) -> None:
        self.taker: EarlyStep | None = None  # an optimizer's step that takes gradients as they arrive in backward
        self.measures_norms = False  # whether each gradient brings its norm
        parts = [part for unit in units for part in unit.parts]
        self.staging = StagingBuffers(parts, window.backend)
        self._units = [UnitGradients(unit, segment, is_summed) for unit in units for segment in unit.segments]
        self.of = {gradient.weight: gradient for unit in self._units for gradient in unit.gradients}
        self._window = window
        self._backend = window.backend
        self._stats = window.stats
        self._landing = landing
        landing.serve(len(parts), max((len(unit.parts) for unit in units), default=1))
        self.arrived: dict[Gradient, bool] = {}
        self._has_others = processes is not None
        self._is_summed = is_summed
        # to add to sums that other processes have, too
        self._turns = Turns(self._units, window.backend, landing, processes)

    # ------------------------------------------------------------------------------------------ while backward runs

    def collect(self, weight: Weight, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others of its unit, and send them if all are there; `is_last`: no more will come."""
        gradient = self.of[weight]
        unit = gradient.unit
        if tensor.requires_grad or tensor.layout is not torch.strided or unit.state is State.CONSUMED:
            raise refusal(weight, tensor)
        if self._has_others:
            is_own_pass = self._turns.is_own_pass
            if not is_own_pass:
                self._turns.begin_pass()
            unit.check_sum(gradient, is_own_pass)
        if gradient in unit.gathered:  # of another leaf, or of a reentrant checkpoint, which accumulates again
            self._send(unit, is_last=False)
        if gradient not in self.arrived:
            if gradient.scaling is not NO_SCALING or gradient.is_seen:
                unit.show(gradient)  # what is there already is not meant for the sum
            self.arrived[gradient] = gradient.host is None
        elif gradient.is_seen:
            self._accumulate([gradient])  # one after the other, as autograd does
        if not unit.gathered:
            unit.begin()
            unit.state = State.HELD
        unit.gathered[gradient] = tensor
        if len(unit.gathered) == len(unit.trained):
            self._send(unit, is_last)

    def send_others(self, reached: Unit | None = None) -> None:
        """Send what units have gathered: all when backward ends, or others than the one reached, and resident ones."""
        for unit in self._units:
            if unit.gathered and (reached is None or not (unit.unit is reached or unit.unit.resident)):
                self._send(unit, is_last=False)

    @torch.no_grad()
    def _send(self, unit: UnitGradients, is_last: bool) -> None:
        """Send what a unit has gathered to where it stays, through a landing buffer, or to the optimizer.

        If it is complete, `is_last` says that nothing more will come.
        """
        self._window.finish_optimizer(unit.unit)  # it may still read what was there
        gathered, unit.gathered = unit.gathered, {}
        gradients, tensors, dtypes = [], [], []
        is_new = is_hidden = True
        for gradient in unit.trained:
            if (tensor := gathered.get(gradient)) is not None:
                gradients.append(gradient)
                tensors.append(tensor)
                weight = gradient.weight
                dtypes.append(weight.gradient_dtype if tensor.dtype is weight.dtype else tensor.dtype)
                gradient.norm = None
                is_new &= gradient.host is None
                is_hidden &= not gradient.is_seen
        layout = unit.layout
        is_last &= dtypes == layout.dtypes
        if dtypes != layout.dtypes:  # some are missing, or a weight was used in another dtype, too
            layout = GradientLayout([gradient.weight for gradient in gradients], dtypes)
        staging = self.staging.take(layout.nbytes)
        torch._foreach_copy_(staging.views(layout)[0], tensors)
        taker = self.taker if is_last and is_hidden else None
        if taker is not None and not taker.wants(unit):
            taker = None
        if unit.sums is not None and not self._turns.is_own_pass:
            buffer = self._landing.take(layout.nbytes, patient=True)
            ticket = self._download(unit, layout, staging, buffer)
            shipment = Shipment(unit, gradients, buffer.views(layout)[0], ticket, buffer)
            is_over = is_last and is_hidden and taker is None
            shipment = self._turns.add(unit, unit.sums, shipment, is_over, self.measures_norms)
            if taker is not None:
                taker.take(shipment)
            return
        has_norms = self.measures_norms and layout.norm_dtype is not None
        passes = is_new and taker is not None and not taker.keeps_gradients
        if is_new and is_hidden and layout is unit.kept_as and not passes:
            unit.wait()
            own = unit.own()
            arrived, norms = own.views(layout)
            shipment = Shipment(unit, gradients, arrived, self._download(unit, layout, staging, own, has_norms), None)
            for gradient, place, norm in zip(gradients, arrived, norms.unbind(), strict=True):
                gradient.host, gradient.norm = place, norm if has_norms else None
        else:
            buffer = self._landing.take(layout.nbytes, patient=not passes)
            ticket = self._download(unit, layout, staging, buffer)
            shipment = Shipment(unit, gradients, buffer.views(layout)[0], ticket, buffer)
            if passes:
                unit.close()  # gradients pass through a few buffers from now on
            else:
                shipment = self._add(shipment, has_norms)
        unit.ticket, unit.state = shipment.ticket, State.HELD
        if taker is not None:
            taker.take(shipment)

    def _download(
        self,
        unit: UnitGradients,
        layout: GradientLayout,
        staging: GradientMemory,
        memory: GradientMemory,
        has_norms: bool = False,
    ) -> Ticket:
        """Copy gradients to the host, and with them their norms where they land in memory of their own."""
        nbytes = layout.norms_at
        if has_norms:
            tensors, measured = staging.views(layout)
            torch.stack(torch._foreach_norm(tensors, 2, layout.norm_dtype), out=measured)
            nbytes = layout.nbytes
        target, source = memory.bytes[:nbytes], staging.bytes[:nbytes]
        ticket = self._backend.trace.copy(Kind.GRADIENTS, unit.unit.name, self._backend.download, target, source)
        staging.ticket = ticket
        self._stats.bytes_to_host += nbytes
        return ticket

    def _add(self, shipment: Shipment, has_norms: bool) -> Shipment:
        """Have the thread for work on host memory add gradients that arrive in a landing buffer to those there."""
        unit, buffer = shipment.unit, shipment.buffer
        assert buffer is not None
        jobs: list[tuple[Tensor, Tensor | None, Tensor]] = []  # target, what it begins with, what is added
        norms: list[tuple[Tensor, Tensor]] = []
        for gradient, arrived in zip(shipment.gradients, shipment.arrived, strict=True):
            before = gradient.host
            stays = before is not None and before.dtype == gradient.weight.dtype
            target = before if before is not None and stays else unit.room_for(gradient, arrived.dtype)
            gradient.host = target
            jobs.append((target, before, arrived))
            if has_norms:
                gradient.norm = torch.empty((), dtype=torch.float32, device="cpu")
                norms.append((gradient.norm, target))
        after = [shipment.ticket] if unit.ticket is None else [shipment.ticket, unit.ticket]

        def add_up() -> None:
            with without_torch_function(), torch.no_grad():
                for target, before, arrived in jobs:
                    if before is not target:
                        target.copy_(arrived if before is None else before)
                    if before is not None:
                        add(target, arrived)
                for norm, target in norms:
                    norm.copy_(torch.linalg.vector_norm(target, dtype=unit.layout.norm_dtype))

        moved = 2 * sum(target.nbytes for target, _, _ in jobs)
        ticket = self._backend.trace.work(Kind.ADD, unit.unit.name, add_up, after, moved, buffer.release)
        return Shipment(unit, shipment.gradients, [target for target, _, _ in jobs], ticket, None)

    def end_pass(self, averages: bool) -> None:
        """End a pass of the processes that share sums of gradients; these may be complete with it."""
        self._turns.end_pass(averages, self.measures_norms)

    def pass_on(self, unit: UnitGradients) -> None:
        """Let other processes go on with a unit that is to be stepped, if its sums are theirs, too."""
        self._turns.pass_on(unit, self._window.copies_of([unit.unit]))

    def take_back(self, shipment: Shipment) -> None:
        """Keep gradients that an optimizer has taken, and not used after all."""
        if shipment.buffer is not None:
            shipment.unit.ticket = self._add(shipment, has_norms=False).ticket

    # ------------------------------------------------------------------------------------------- when backward ends

    @torch.no_grad()
    def finish(self) -> bool:
        """Send what is left, and call users' hooks; tell whether any gradient has come."""
        self.send_others()
        if self.taker is not None:
            self.taker.finish_backward()
        some_came, seen = bool(self.arrived), list(filter(attrgetter("is_seen"), self.arrived))
        self.arrived.clear()
        if seen:
            self._accumulate(seen)
        return some_came

    def _accumulate(self, gradients: Sequence[Gradient]) -> None:
        """Add to `.grad` what somebody sees, and call users' hooks, in the order in which autograd would."""
        self.settle()
        for gradient in gradients:
            master, added = gradient.weight.master, gradient.unit.take(gradient)
            if added is None:  # somebody has dropped it
                continue
            added = run_hooks(tensor_hooks(master), added)
            if master.grad is None:
                master.grad = added
            else:
                master.grad.add_(added.to(master.grad.device))
            for hook in post_accumulate_hooks(master):
                hook(master)

    def abandon_pass(self) -> None:
        """Have other processes not wait for this one's part of a backward pass that an exception has ended."""
        if not self._turns.is_own_pass:
            self.end_pass(averages=False)

    def abandon(self) -> None:
        """Forget what has come in a backward pass that an exception has ended, if it was one."""
        for unit in self._units:
            with contextlib.suppress(Exception):  # its error was raised already, or is due to the exception
                unit.wait()
        for gradient, is_new in self.arrived.items():
            gradient.unit.gathered.clear()
            gradient.unit.state = State.HELD
            gradient.unit.forget([gradient] if is_new else [])
        self.arrived.clear()
        self._landing.abandon()

    # ------------------------------------------------------------------- between one backward pass and the next

    @property
    def settled(self) -> bool:
        """Whether the engine has no gradients that nobody has asked for, so that anybody may read `.grad`."""
        return all(unit.state is State.EMPTY for unit in self._units)

    @property
    def lacks_sums(self) -> bool:
        """Whether a weight is trained now that has no sum over processes, as it was frozen when units were arranged."""
        return self._is_summed and any(unit.lacks_a_sum() for unit in self._units)

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        under_way = [unit for unit in self._units if unit.ticket is not None and unit.state is not State.EMPTY]
        self._stats.host_syncs += bool(under_way)
        for unit in under_way:
            unit.wait()

    def show_all(self) -> None:
        """Make all gradients the masters' `.grad`, but for parts of sums, which another arrangement takes up."""
        for gradient in self.of.values():
            if gradient.unit.sums is not None and gradient.unit.sums.is_partial:
                gradient.take_look_back()
            else:
                gradient.unit.show(gradient)

    def consume(self, gradients: Iterable[Gradient]) -> None:
        """Leave weights without gradients, as a step has used them."""
        used: dict[UnitGradients, list[Gradient]] = {}
        for gradient in gradients:
            gradient.weight.master.grad = None
            used.setdefault(gradient.unit, []).append(gradient)
        for unit, of_unit in used.items():
            unit.forget(of_unit)

    def close(self) -> None:
        """Show all gradients; units' own memory stays beside their masters'."""
        self.abandon()
        self.show_all()
        for unit in self._units:
            unit.memory = None
        self.staging.close()
