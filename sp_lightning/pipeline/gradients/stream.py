"""The stream of gradients from the twins on the device to the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy on one of the routes of routes.py.

When backward ends, the last gradients may still be on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded as long as the engine has gradients that nobody has asked for.

What a process has to agree on with others is its `Exchange`: nothing if it is alone. The processes of a machine have
one of their own (processes/turns.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.routes import Routes, Shipment
from sp_lightning.pipeline.gradients.segment_gradients import NO_SCALING, Gradient, SegmentGradients, State
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.operands import run_hooks
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

    def __init__(
        self,
        by_segment: Sequence[SegmentGradients],
        window: Window,
        routes: Routes,
        exchange: Exchange,
    ) -> None:
        # an optimizer's step that uses gradients as they arrive in backward
        self.early: EarlyStep | None = None
        self.of: dict[Weight, Gradient] = {}
        for of_segment in by_segment:
            self.of.update(zip(of_segment.segment.weights, of_segment.gradients, strict=True))
        self.pending: dict[Gradient, bool] = {}
        self._seen: list[Gradient] = []  # those of them that somebody sees being added up
        self.routes = routes
        self.exchange = exchange  # with other processes
        self._by_segment = by_segment
        self._window = window

    # ------------------------------------------------------------------------------------------ while backward runs

    def collect(self, weight: Weight, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others of its unit, and send them if all are there; `is_last`: no more will come."""
        gradient = self.of[weight]
        of_segment = gradient.of_segment
        is_sendable = tensor.layout is torch.strided and not tensor.requires_grad
        if not is_sendable or of_segment.state is State.CONSUMED:
            raise refusal(weight, tensor)
        if not self.pending:
            self.exchange.begin_pass()
        # of another leaf, or of a reentrant checkpoint, which accumulates again
        if gradient in of_segment.gathered:
            self._send(of_segment, is_last=False)
        is_seen = gradient.is_seen
        if gradient not in self.pending:
            if is_seen or gradient.scaling is not NO_SCALING:
                self.exchange.show(gradient)  # what is there already is not meant for the sum
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
        # it may still read what was there; a visit reads what has stayed before computing goes on
        if of_segment.memory is not None or not of_segment.unit.visits:
            self._window.finish_optimizer(of_segment.unit)
        if of_segment.is_on_device:  # and now there is more to come
            self.routes.bring_home(of_segment)
        shipment = self.routes.gather(of_segment)
        is_final = is_last and shipment.layout is of_segment.layout and not shipment.is_watched
        for gradient in shipment.gradients:
            if gradient.weight.other_twins:  # leaves of the same weight, which have gradients of their own
                is_final = False
        early = self.early if is_final else None
        if early is not None and not early.wants(of_segment):
            early = None
        self._ship(shipment, early, is_final)
        of_segment.ticket = shipment.ticket
        if early is not None:
            early.receive(shipment)

    def _ship(self, shipment: Shipment, early: EarlyStep | None, is_final: bool) -> None:
        """Choose the route of gradients, which an early step uses next if there is one, and send them."""
        routes = self.routes
        is_kept = not shipment.is_watched and shipment.layout is shipment.of_segment.kept_as
        steps_next = early is not None or routes.measures_norms
        if self.exchange.adds_up(shipment):
            routes.land(shipment)
            self.exchange.add(shipment, is_final and early is None, routes.measures_norms)
        elif shipment.of_segment.unit.visits and shipment.is_new and is_final and is_kept and steps_next:
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
            added = self.exchange.take(gradient)
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
                self.exchange.drop([gradient])
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
        """Make all gradients the masters' `.grad`, but for parts of sums, which another arrangement takes up."""
        self.exchange.show_all(self.of.values())

    def consume(self, gradients: Collection[Gradient]) -> None:
        """Leave weights without gradients, as a step has used them."""
        for gradient in gradients:
            gradient.weight.master.grad = None
        self.exchange.drop(gradients)

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


class Exchange:
    """Of a process that is alone; what others may have a part in."""

    # ------------------------------------------------------------------------------------- in a backward pass

    def begin_pass(self) -> None:
        """Begin a backward pass: it brings its first gradient."""

    def adds_up(self, shipment: Shipment) -> bool:
        """Tell whether gradients are a part of sums that other processes have, too.

        Raises:
            RuntimeError: They can be neither that nor this process's own.
        """
        return False

    def add(self, shipment: Shipment, is_over: bool, measures_norms: bool) -> None:
        """Add what is on its way to those sums; `is_over`: this pass brings no more of the unit."""

    def pass_on(self, of_segment: SegmentGradients, after: Sequence[Ticket]) -> bool:
        """Let others go on with a unit, which is to be stepped then; tell whether the step awaits them."""
        return False

    def end_pass(self, averages: bool, measures_norms: bool) -> None:
        """End a pass of all processes; the sums are complete with it if it `averages`."""

    def abandon_pass(self) -> None:
        """Have others not wait for this process's part of a pass that an exception has ended."""

    # ------------------------------------------------------------------- between one backward pass and the next

    @property
    def lacks_sums(self) -> bool:
        """Whether a weight is trained now that has no sum over processes, as it was frozen when units were arranged."""
        return False

    def show(self, gradient: Gradient) -> None:
        """Make what has landed of a gradient the master's `.grad`, which is the user's."""
        shown = self.take(gradient)
        if shown is not None:
            gradient.weight.master.grad = shown

    def show_all(self, gradients: Iterable[Gradient]) -> None:
        """Show gradients that somebody may look at while the engine cannot be asked."""
        for gradient in gradients:
            self.show(gradient)

    def take(self, gradient: Gradient) -> Tensor | None:
        """Return what has landed of a gradient, which the engine then has no longer; None if there is nothing."""
        if gradient.tensor is None:
            return None
        gradient.of_segment.wait()
        with torch.inference_mode(False), torch.no_grad():
            taken = torch.empty_like(gradient.weight.host).copy_(gradient.tensor)
            gradient.scaling.apply_(taken)
        self.drop([gradient])
        return taken

    def drop(self, gradients: Collection[Gradient]) -> None:
        """Drop what the engine has of these on the host."""
        for gradient in gradients:
            gradient.tensor = gradient.norm = None
            gradient.scaling = NO_SCALING
        for of_segment in {gradient.of_segment for gradient in gradients}:
            of_segment.note_dropped()
