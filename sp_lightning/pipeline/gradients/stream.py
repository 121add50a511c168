"""The stream of gradients from the twins on the device to the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy, in the dtype they were computed in. With other processes they are averaged in the
staging buffer first (averaged_stream.py).

    device                        on its way                  host
    leaf.grad -> staging buffer ----------------------------> the unit's own buffer        (first of a step)
                      -----------------> landing buffer ---> added to what is there       (accumulation)
                      -----------------> landing buffer ---> the optimizer                (it steps in backward)

When backward ends, the last gradients may still be on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded as long as the engine has gradients that nobody has asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import LandingBuffers, StagingBuffer, StagingBuffers
from sp_lightning.pipeline.gradients.held import HeldGradients
from sp_lightning.pipeline.gradients.layout import GradientLayout
from sp_lightning.pipeline.gradients.scaling import NO_SCALING
from sp_lightning.pipeline.gradients.shipment import Shipment, Taker
from sp_lightning.pipeline.gradients.sums import add_up
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, State, UnitGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import post_accumulate_hooks, tensor_hooks, without_torch_function
from sp_lightning.pipeline.weights.graphs import run_hooks
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


class GradientStream(HeldGradients):
    """Brings gradients to the host.

    Attributes:
        taker: What takes gradients as they arrive, while there is such a thing.
        measures_norms: Whether each gradient brings its norm.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        window: Window,
        backend: Backend,
        stats: Stats,
        pin: bool,
    ) -> None:
        super().__init__({unit: UnitGradients(unit, backend, pin) for unit in units}, stats)
        self.taker: Taker | None = None
        self.measures_norms = False
        self._window = window
        self._backend = backend
        self._staging = StagingBuffers(units, backend)
        self._landing = LandingBuffers(units, backend, pin)
        self._gathering: dict[UnitGradients, None] = {}
        self._sent: dict[UnitGradients, None] = {}  # in this backward pass
        self._arrived: dict[Gradient, None] = {}  # the same, in autograd's order
        self._moving: list[UnitGradients] = []  # into sums, out of memory that is no longer needed then
        self._has_late = False
        self._given_up = 0, 0

    # ------------------------------------------------------------------------------------------ while backward runs

    def gather(self, weight: Weight, tensor: Tensor) -> UnitGradients | None:
        """Put a gradient with the others of its unit.

        Returns:
            The gradients of the unit, if they are complete now: they are to be sent.
        """
        gradient = self._of[weight]
        unit = gradient.unit
        self._check(gradient, tensor)
        gradient.look()
        gradient.under_way = True
        self._arrived[gradient] = None
        if not unit.gathered:
            self._begin(unit)
        self._put(gradient, tensor)
        return unit if unit.gathered == len(unit.trained) else None

    def _put(self, gradient: Gradient, tensor: Tensor) -> None:
        unit = gradient.unit
        if gradient.on_device is not None:  # reentrant checkpoints accumulate several times in one backward
            self.send(unit, is_last=False)
            self._begin(unit)
        elif tensor.dtype != gradient.dtype:  # of another leaf, as the weight was used in another dtype, too
            self._send_alone(gradient, tensor)
            return
        unit.gathered += 1
        gradient.on_device = tensor

    def _check(self, gradient: Gradient, tensor: Tensor) -> None:
        name = gradient.weight.name
        if tensor.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) would leave a gradient with a graph on weight {name!r}, whose gradient "
                "lives on the host. Use torch.autograd.grad(..., create_graph=True) for the inner gradient."
            )
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"Weight {name!r} got a sparse gradient. Let it be dense (`sparse=False`), or compute it in an "
                "`nn.Embedding(sparse=True)`, which lives on the device."
            )
        if gradient.unit.state is State.CONSUMED:
            raise RuntimeError(
                f"Weight {name!r} got another gradient after it was stepped in this backward pass. Train with "
                "`overlap_optimizer=False`."
            )

    def _begin(self, unit: UnitGradients) -> None:
        unit.begin()
        unit.state = State.GATHERING
        self._gathering[unit] = None

    def left_behind(self, units: Sequence[Unit]) -> list[UnitGradients]:
        """Return what all other units have gathered: backward has moved on to these."""
        return [unit for unit in self._gathering if unit.unit not in units]

    @torch.no_grad()
    def send(self, unit: UnitGradients, is_last: bool) -> None:
        """Send what a unit has gathered to the host.

        Args:
            unit: The gradients of the unit.
            is_last: Whether nothing more will come if they are complete.
        """
        self._gathering.pop(unit, None)
        complete = unit.gathered == len(unit.trained)
        gradients = unit.trained if complete else [g for g in unit.trained if g.on_device is not None]
        layout = unit.layout
        if not complete:
            layout = GradientLayout([g.weight for g in gradients], [g.dtype for g in gradients])
        staging = self._staging.take(layout.nbytes)
        targets = staging.views(layout)[0] if complete else layout.tensors_in(staging.memory)
        torch._foreach_copy_(targets, [g.on_device for g in gradients])  # type: ignore[misc]
        for gradient in gradients:
            gradient.on_device = None
        unit.gathered = 0
        self._dispatch(unit, gradients, layout, staging, complete, is_last)

    def _send_alone(self, gradient: Gradient, tensor: Tensor) -> None:
        unit = gradient.unit
        if not unit.gathered:
            del self._gathering[unit]
        with torch.no_grad():
            layout = GradientLayout([gradient.weight], [tensor.dtype])
            staging = self._staging.take(layout.nbytes)
            layout.tensors_in(staging.memory)[0].copy_(tensor)
            self._dispatch(unit, [gradient], layout, staging, complete=False, is_last=False)

    def _dispatch(
        self,
        unit: UnitGradients,
        gradients: Sequence[Gradient],
        layout: GradientLayout,
        staging: StagingBuffer,
        complete: bool,
        is_last: bool,
    ) -> None:
        """Send a staging buffer to where its gradients stay, through a landing buffer, or to the optimizer."""
        self._window.finish_optimizer(unit.unit.group)  # it may still read what was there
        for moved in [other for other in self._moving if other.ticket is None or other.ticket.done]:
            self._moving.remove(moved)
            moved.release_own()
        is_first = is_hidden = True
        for gradient in gradients:
            if gradient.scaling is not NO_SCALING:  # which is not meant for the sum
                self._show(gradient)
                gradient.is_seen = True
            gradient.norm = None
            is_first &= gradient.host is None
            is_hidden &= not gradient.is_seen
        if unit not in self._sent:
            self._sent[unit] = None
            unit.is_new = all(gradient.host is None for gradient in unit.gradients)
        taker = self.taker if complete and is_last and is_hidden else None
        if taker is not None and not taker.wants(unit):
            taker = None
        has_norms = self.measures_norms and layout.can_be_measured
        is_plain = complete and is_first and is_hidden
        if is_plain and taker is not None and not taker.keeps_gradients:
            unit.release_empty()  # gradients pass through a few buffers from now on
            shipment = self._send_through_buffer(unit, gradients, layout, staging, patient=False)
        elif is_plain and unit.sums is None:
            shipment = self._land(unit, gradients, layout, staging, has_norms)
        else:
            arriving = self._send_through_buffer(unit, gradients, layout, staging, patient=True)
            had_sums = unit.sums is not None
            shipment = self._add(arriving, has_norms)
            if unit.sums is not None and not had_sums:
                self._moving.append(unit)
        unit.ticket = shipment.ticket
        unit.state = State.GATHERING if unit.gathered else State.LEAVING
        self._held[unit] = None
        if taker is not None:
            taker.take(shipment)

    def _land(
        self,
        unit: UnitGradients,
        gradients: Sequence[Gradient],
        layout: GradientLayout,
        staging: StagingBuffer,
        has_norms: bool,
    ) -> Shipment:
        unit.wait()
        memory, tensors, norms = unit.own()
        if has_norms:
            views, measured = staging.views(layout)
            torch.stack(torch._foreach_norm(views, 2, torch.float32), out=measured)
        nbytes = layout.nbytes if has_norms else layout.norms_at
        ticket = self._copy(unit, memory, staging, nbytes)
        for gradient, tensor, norm in zip(gradients, tensors, norms, strict=True):
            gradient.host = tensor
            gradient.norm = norm if has_norms else None
        return Shipment(unit, gradients, tensors, ticket, None)

    def _send_through_buffer(
        self,
        unit: UnitGradients,
        gradients: Sequence[Gradient],
        layout: GradientLayout,
        staging: StagingBuffer,
        patient: bool,
    ) -> Shipment:
        buffer = self._landing.take(layout.nbytes, patient)
        tensors = layout.tensors_in(buffer.memory) if layout is not unit.layout else buffer.views(layout)[0]
        ticket = self._copy(unit, buffer.memory, staging, layout.norms_at)
        return Shipment(unit, gradients, tensors, ticket, buffer)

    def _copy(self, unit: UnitGradients, memory: Tensor, staging: StagingBuffer, nbytes: int) -> Ticket:
        ticket = staging.ticket = self._backend.download(memory[:nbytes], staging.memory[:nbytes])
        self._backend.trace.moved(Kind.GRADIENTS, unit.unit.name, nbytes, ticket)
        self._stats.bytes_to_host += nbytes
        return ticket

    # ------------------------------------------------------------------------------------------------------- sums

    def _add(self, shipment: Shipment, has_norms: bool) -> Shipment:
        """Have the thread for work on host memory add gradients that arrive in a landing buffer to those there."""
        unit, buffer = shipment.unit, shipment.buffer
        assert buffer is not None
        jobs: list[tuple[Tensor, Tensor | None, Tensor]] = []  # target, what it begins with, what is added
        norms: list[tuple[Tensor, Tensor]] = []
        for gradient, arrived in zip(shipment.gradients, shipment.arrived, strict=True):
            if gradient.is_seen:  # users' hooks must not run in the thread
                target = torch.empty_like(gradient.weight.host)
                gradient.late.append(target)
                self._has_late = True
                jobs.append((target, None, arrived))
                continue
            before = gradient.host
            stays = before is not None and before.dtype == gradient.weight.dtype
            target = before if before is not None and stays else unit.room_for(gradient)
            gradient.host = target
            jobs.append((target, before, arrived))
            if has_norms:
                gradient.norm = torch.empty(())
                norms.append((gradient.norm, target))
        after = [shipment.ticket] if unit.ticket is None else [shipment.ticket, unit.ticket]

        def add() -> None:
            with without_torch_function(), torch.no_grad():
                for target, before, arrived in jobs:
                    add_up(target, before, arrived)
                for norm, target in norms:
                    norm.copy_(torch.linalg.vector_norm(target, dtype=torch.float32))

        moved = 2 * sum(target.nbytes for target, _, _ in jobs)
        ticket = self._backend.work(add, after, moved, buffer.release)
        self._backend.trace.moved(Kind.ADD, unit.unit.name, moved, ticket)
        return Shipment(unit, shipment.gradients, [target for target, _, _ in jobs], ticket, None)

    def take_back(self, shipment: Shipment) -> None:
        """Keep gradients that an optimizer has taken, and not used after all."""
        if shipment.buffer is not None:
            shipment.unit.ticket = None if shipment.unit.ticket is shipment.ticket else shipment.unit.ticket
            shipment.unit.ticket = self._add(shipment, has_norms=False).ticket

    # ------------------------------------------------------------------------------------------- when backward ends

    @torch.no_grad()
    def finish(self, takes_part: bool = False) -> None:
        """Send what is left, and call users' hooks. The last gradients may not have landed yet.

        Args:
            takes_part: Whether to take part in averaging even if no gradient has arrived in this process.
        """
        self._send_rest(takes_part)
        if self.taker is not None:
            self.taker.end_of_backward()
        for gradient in self._arrived:
            gradient.under_way = False
        if self._has_late:
            self._add_late()
        for unit in self._sent:
            unit.release_own()
            self._note_held(unit)
        self._forget()

    def _send_rest(self, takes_part: bool) -> None:
        for unit in list(self._gathering):
            self.send(unit, is_last=False)

    def _add_late(self) -> None:
        """Add to `.grad` what somebody sees, and call users' hooks, in the order in which autograd would."""
        self.settle()
        for gradient in [gradient for gradient in self._arrived if gradient.late]:
            master, late = gradient.weight.master, gradient.late
            gradient.late = []
            gradient.show()
            for tensor in late:
                added = run_hooks(tensor_hooks(master), tensor)
                if master.grad is None:
                    master.grad = added
                else:
                    master.grad.add_(added.to(master.grad.device))
            for hook in post_accumulate_hooks(master):
                hook(master)

    def abandon(self) -> None:
        """Forget what has come in a backward pass that an exception has ended."""
        for unit in self.units.values():
            with contextlib.suppress(Exception):  # its error was raised already, or is due to the exception
                unit.wait()
        for unit in [unit for unit in self.units.values() if unit.gathered or unit in self._sent]:
            unit.gathered = 0
            for gradient in unit.gradients:
                gradient.on_device = None
                if unit.is_new or unit.state is State.CONSUMED:
                    gradient.forget()
            unit.state = State.LANDED
            self._note_held(unit)
        for gradient in self._arrived:
            gradient.under_way = False
            gradient.late.clear()
        self._landing.abandon()
        self._staging.abandon()
        self._forget()

    def _forget(self) -> None:
        self._gathering.clear()
        self._sent.clear()
        self._arrived.clear()
        self._moving.clear()
        self._has_late = False

    # ------------------------------------------------------------------------------------------------------- memory

    def reserve(self) -> None:
        """Allocate the device memory through which gradients leave, before a step that may have a backward."""
        self._staging.reserve()

    def device_bytes(self) -> int:
        """Return the bytes of device memory held for gradients that leave."""
        return self._given_up[0] + self._staging.nbytes()

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for gradients."""
        return self._given_up[1] + self._landing.nbytes() + sum(unit.host_bytes() for unit in self.units.values())

    def close(self) -> None:
        """Show all gradients, and release all other memory, which `device_bytes` and `host_bytes` still count."""
        self._given_up = self.device_bytes(), self.host_bytes()
        self.abandon()
        self.show_all()
        for unit in self.units.values():
            unit.close()
        self._staging.close()
        self._landing.close()
