"""The stream of gradients from the twins on the device to the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy on one of the routes of routes.py.

When backward ends, the last gradients may still be on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded as long as the engine has gradients that nobody has asked for.

Where several processes train the module, gradients are averaged on the device on their way (processes/averages.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.routes import Routes, Shipment
from sp_lightning.pipeline.gradients.segment_gradients import (
    NO_SCALING,
    Gradient,
    SegmentGradients,
    State,
    drop,
)  # fmt: skip
from sp_lightning.pipeline.operands import run_hooks
from sp_lightning.pipeline.processes.averages import Averages
from sp_lightning.pipeline.torch_private import post_accumulate_hooks, tensor_hooks
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window

if TYPE_CHECKING:
    from sp_lightning.pipeline.optimizer.early_step import EarlyStep


class GradientStream:
    """Brings gradients to the host, and has them there until somebody asks for them or a step has used them.

    Attributes:
        of: The gradient of each weight.
        pending: What the backward that is running has brought, in autograd's order: nobody can read it yet. The value
            tells whether the engine had nothing of it before.
    """

    def __init__(self, window: Window, routes: Routes) -> None:
        # an optimizer's step that uses gradients as they arrive in backward
        self.early: EarlyStep | None = None
        self.pending: dict[Gradient, bool] = {}
        self._seen: list[Gradient] = []  # those of them that somebody sees being added up
        self.routes = routes
        self.averages: Averages | None = None  # over processes; None if there is only one
        self._window = window
        self.bring(())

    def bring(self, by_segment: Sequence[SegmentGradients]) -> None:
        """Bring the gradients of these segments from now on; it has none of others."""
        self._by_segment = by_segment
        self.of = {gradient.weight: gradient for of_segment in by_segment for gradient in of_segment.gradients}

    # ------------------------------------------------------------------------------------------ while backward runs

    def collect(self, weight: Weight, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others of its unit, and send them if all are there; `is_last`: no more will come."""
        gradient = self.of[weight]
        of_segment = gradient.of_segment
        is_sendable = tensor.layout is torch.strided and not tensor.requires_grad
        if not is_sendable or of_segment.state is State.CONSUMED:
            raise refusal(weight, tensor)
        averages = self.averages
        if averages is not None:
            averages.begin_pass()
        is_averaged = averages is not None and averages.adds_up(gradient)
        # of another leaf, or of a reentrant checkpoint, which accumulates again
        if gradient in of_segment.gathered and is_averaged:  # it leaves once
            tensor = of_segment.gathered.pop(gradient).to(weight.dtype) + tensor
            of_segment.missing += 1
        elif gradient in of_segment.gathered:
            self._send(of_segment, is_last=False)
        is_seen = gradient.is_seen
        if gradient not in self.pending:
            if is_seen or gradient.scaling is not NO_SCALING:
                gradient.show()  # what is there already is not meant for the sum
                is_seen = gradient.is_seen
            self.pending[gradient] = gradient.tensor is None
            if is_seen:
                self._seen.append(gradient)
        elif is_seen:
            self._accumulate([gradient])  # one after the other, as autograd does
        if not of_segment.gathered:
            of_segment.expect()
        of_segment.hold()  # even if what was shown was all that it had
        of_segment.gathered[gradient] = tensor
        of_segment.missing -= 1
        of_segment.is_watched |= is_seen
        if not of_segment.missing:
            self._send(of_segment, is_last)

    def send_others(self, reached: Unit | None = None) -> None:
        """Send what units have gathered: all when backward ends, or others than the one reached, and resident ones."""
        for of_segment in self._by_segment:
            unit = of_segment.unit
            may_wait = reached is not None and (unit is reached or unit.resident)
            if of_segment.gathered and not may_wait:
                self._send(of_segment, is_last=False)

    def _send(self, of_segment: SegmentGradients, is_last: bool) -> None:
        """Send what a unit has gathered; if it is complete, `is_last` says that nothing more will come."""
        is_final = is_last
        for gradient in of_segment.gathered:
            # leaves of the same weight, which have gradients of their own
            if gradient.weight.other_twins:
                is_final = False
        if self.averages is not None and self.averages.has(of_segment):
            self._step_early(self.averages.send(of_segment, is_final))
            return
        if self.averages is not None:  # which lies in the same staging buffers
            self._step_early(self.averages.come_round())
        # it may still read what was there; a visit reads what has stayed before computing goes on
        if of_segment.memory is not None or not of_segment.unit.visits:
            self._window.finish_optimizer(of_segment.unit)
        if of_segment.is_on_device:  # and now there is more to come
            self.routes.bring_home(of_segment)
        shipment = self.routes.gather(of_segment)
        is_final &= shipment.layout is of_segment.layout and not shipment.is_watched
        # another process may see what this one does not: they are averaged when backward has ended
        early = self.early if is_final and self.averages is None else None
        if early is not None and not early.wants(of_segment):
            early = None
        self._ship(shipment, early, is_final)
        of_segment.ticket = shipment.ticket
        if early is not None:
            early.receive(shipment)

    def _step_early(self, averaged: Iterable[Shipment]) -> None:
        """Have an early step, if there is one, use gradients whose averages are on their way."""
        if self.early is not None:
            self.early.receive_averaged(averaged)

    def _ship(self, shipment: Shipment, early: EarlyStep | None, is_final: bool) -> None:
        """Choose the route of gradients, which an early step uses next if there is one, and send them."""
        routes = self.routes
        is_kept = not shipment.is_watched and shipment.layout is shipment.of_segment.kept_as
        steps_next = early is not None or routes.measures_norms
        if shipment.of_segment.unit.visits and shipment.is_new and is_final and is_kept and steps_next:
            routes.stay(shipment)
        elif shipment.is_new and early is not None and not early.keeps_gradients:
            routes.pass_to_step(shipment)
        elif shipment.is_new and is_kept:
            routes.keep(shipment)
        else:
            routes.land(shipment)
            routes.add(shipment, routes.measures_norms)

    def take_back(self, shipment: Shipment) -> None:
        """Keep gradients that an optimizer has received, and not used after all."""
        if shipment.buffer is not None:
            self.routes.add(shipment, measures_norms=False)
            shipment.of_segment.ticket = shipment.ticket

    # ------------------------------------------------------------------------------------------- when backward ends

    @torch.no_grad()
    def end_backward(self) -> bool:
        """Send what is left, and call users' hooks; tell whether any gradient has come."""
        self.send_others()
        if self.pending and self.averages is not None:
            self._step_early(self.averages.send_rest())
        if self.early is not None:
            self.early.end_unit()
        some_came = bool(self.pending)
        self.pending.clear()
        if self._seen:
            seen = self._seen
            self._seen = []
            self._accumulate(seen)
        return some_came

    def _accumulate(self, gradients: Sequence[Gradient]) -> None:
        """Add to `.grad` what somebody sees, and call users' hooks, in the order in which autograd would."""
        self.settle()
        for gradient in gradients:
            master = gradient.weight.master
            added = gradient.take()
            if added is None:  # somebody has dropped it
                continue
            added = run_hooks(tensor_hooks(master), added)
            if master.grad is None:
                master.grad = added
            else:
                master.grad.add_(added.to(master.grad.device))
            for hook in post_accumulate_hooks(master):
                hook(master)

    def abandon(self) -> None:
        """Forget what has come in a backward pass that an exception has ended, if it was one."""
        for of_segment in self._by_segment:
            # its error was raised already, or is due to the exception
            with contextlib.suppress(Exception):
                of_segment.wait()
        for gradient, is_new in self.pending.items():
            gradient.of_segment.forget_gathered()
            if is_new:
                drop([gradient])
            else:
                gradient.of_segment.note_dropped()
        self.pending.clear()
        self._seen = []
        self.routes.abandon()

    # ------------------------------------------------------------------- between one backward pass and the next

    @property
    def settled(self) -> bool:
        """Whether the engine has no gradients that nobody has asked for, so that anybody may read `.grad`."""
        return all(of_segment.state is State.EMPTY for of_segment in self._by_segment)

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        waits = False
        for of_segment in self._by_segment:
            if of_segment.ticket is not None and of_segment.state is not State.EMPTY:
                waits = True
                of_segment.wait()
        if waits:
            self._window.stats.host_syncs += 1

    def show_all(self) -> None:
        """Make all gradients the masters' `.grad`."""
        for gradient in self.of.values():
            gradient.show()

    def consume(self, gradients: Collection[Gradient]) -> None:
        """Leave weights without gradients, as a step has used them."""
        for gradient in gradients:
            gradient.weight.master.grad = None
        drop(gradients)

    def close(self) -> None:
        """Show all gradients; units' own memory stays beside their masters'."""
        self.abandon()
        self.show_all()
        for of_segment in self._by_segment:
            of_segment.memory = None
        self.routes.staging.close()


def refusal(weight: Weight, tensor: Tensor) -> RuntimeError:
    """Make the error for a gradient that cannot be sent."""
    if tensor.requires_grad:
        return RuntimeError(
            "backward(create_graph=True) would leave a gradient with a graph on weight "
            f"{weight.name!r}, whose gradient lives on the host. Use torch.autograd.grad(..., "
            "create_graph=True) for the inner gradient."
        )
    if tensor.layout is not torch.strided:
        return RuntimeError(
            f"Weight {weight.name!r} got a sparse gradient. Let it be dense (`sparse=False`, "
            "`to_dense()`), or compute it in an `nn.Embedding(sparse=True)`, which lives on the "
            "device."
        )
    return RuntimeError(
        f"Weight {weight.name!r} got another gradient after it was stepped in this backward pass. "
        "Train with `overlap_optimizer=False`."
    )
