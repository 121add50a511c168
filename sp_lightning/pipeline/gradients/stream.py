"""The stream of gradients from the twins on the device to the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy on one of the routes of routes.py.

When backward ends, the last gradients may still be on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded for as long as the engine has gradients that no code has asked for.

Where several processes train the module, gradients are averaged on the device on their way (processes/averages.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.routes import Arrival, Route, Routes, WaitingGradients, route_of
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients, StepInBackward, Stored
from sp_lightning.pipeline.operations import run_hooks
from sp_lightning.pipeline.processes.averages import Averages
from sp_lightning.pipeline.torch_private import tensor_hooks
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.weight import GradientLife, Weight
from sp_lightning.pipeline.window.window import Window


class GradientStream:
    """Brings gradients to the host, and has them there until other code asks for them or a step has used them.

    Attributes:
        gradient_of: The gradient of each weight.
        early_step: The step that uses gradients in this backward pass; None if there is none.
        pending: The gradients of the backward pass that is running, in autograd's order. They cannot be read yet. The
            value tells whether users see how a gradient is added up.
    """

    def __init__(self, window: Window, waiting: WaitingGradients) -> None:
        self.early_step: StepInBackward | None = None
        self.pending: dict[Gradient, bool] = {}
        self.routes = Routes(window, waiting)
        # Averages gradients over processes; None if there is only one.
        self.averages: Averages | None = None
        self._window = window
        self._waiting = waiting
        self.follow_segments(())

    def follow_segments(self, by_segment: Sequence[SegmentGradients]) -> None:
        """Bring the gradients of these segments from now on, and of no others."""
        self._by_segment = by_segment
        gradients = [gradient for of_segment in by_segment for gradient in of_segment.gradients]
        self.gradient_of = {gradient.weight: gradient for gradient in gradients}

    # ------------------------------------------------------------------------------------------ while backward runs

    def collect(self, weight: Weight, tensor: Tensor, is_last: bool) -> None:
        """Put a gradient with the others of its unit, and send them if all are there.

        Where `is_last`, the weight gets no more gradients in this backward pass.
        """
        gradient = self.gradient_of[weight]
        of_segment = gradient.of_segment
        is_sendable = tensor.layout is torch.strided and not tensor.requires_grad
        if not is_sendable or of_segment.is_consumed:
            raise refusal(weight, tensor)
        if gradient in of_segment.gathered or self.averages is not None:
            tensor = self._after_earlier(gradient, tensor)
        if gradient not in self.pending:
            accumulates_in_grad = gradient.accumulates_in_grad
            if accumulates_in_grad or gradient.factors:
                gradient.show()  # the earlier gradient is not part of the engine's sum
                accumulates_in_grad = gradient.accumulates_in_grad
            self.pending[gradient] = accumulates_in_grad
        elif self.pending[gradient]:
            self._accumulate([gradient])  # one after the other, as autograd does
        of_segment.gather(gradient, tensor, is_last)
        if not of_segment.missing and not self._awaits_others(of_segment):
            self._send(of_segment)

    def _awaits_others(self, of_segment: SegmentGradients) -> bool:
        """Tell whether gradients leave only when backward has left their unit, so that it can be stepped with them.

        An inner checkpoint holds frozen weights without a handle, and may read them after the others had gradients. A
        custom Function may do the same with any of its arguments.
        """
        if self.early_step is None:
            return False
        readers = of_segment.unit.readers
        is_trained = len(of_segment.trained) == len(of_segment.unit.weights)
        return readers.handles > 0 or readers.has_raw_readers or not is_trained

    def _after_earlier(self, gradient: Gradient, tensor: Tensor) -> Tensor:
        """Send a weight's earlier gradient, unless both are sent together; return the gradient to send next.

        The earlier one came from another leaf, or from a reentrant checkpoint, which accumulates again.
        """
        of_segment = gradient.of_segment
        is_averaged = self.averages is not None and self.averages.awaits(gradient)
        if gradient in of_segment.gathered and is_averaged:  # both are sent together
            return of_segment.gathered[gradient].to(gradient.weight.dtype) + tensor
        if gradient in of_segment.gathered:
            self._send(of_segment, more_comes=True)
        return tensor

    def send_others(self, reached: Unit | None = None) -> None:
        """Send the gathered gradients of all units, or of streamed units other than the one that was `reached`."""
        for of_segment in self._by_segment:
            unit = of_segment.unit
            may_wait = reached is not None and (unit is reached or unit.resident)
            if of_segment.gathered and not may_wait:
                self._send(of_segment)

    def _send(self, of_segment: SegmentGradients, more_comes: bool = False) -> None:
        """Send the gradients that a unit has gathered; `more_comes` if others are known to follow."""
        # Other leaves of the weight have gradients of their own, and users may see how it is added up.
        accumulates_in_grad = False
        for gradient in of_segment.gathered:
            accumulates_in_grad |= self.pending[gradient]
            more_comes |= bool(gradient.weight.twins_in_graphs)
        is_final = of_segment.is_last and not (more_comes or accumulates_in_grad)
        if self.averages is not None and self.averages.send(of_segment, is_final, self.early_step):
            return
        # An update on the device may still read the earlier sums, and begins when other work waits for it. A step on
        # the host is over: computing has waited for the weights that it wrote.
        stored, updates_on_device = of_segment.stored, of_segment.unit.update.is_on_device
        if stored is Stored.ON_DEVICE or (of_segment.memory_beside_masters.memory is not None and updates_on_device):
            self._window.finish_optimizer(of_segment.unit)
        of_segment.lay_out()
        is_complete = is_final and not of_segment.missing
        # Users of another process may see a gradient that is not seen here. So averages are used after backward.
        early = self.early_step if is_complete and self.averages is None else None
        if early is not None and not early.wants(of_segment):
            early = None
        steps_next = early is not None or self.routes.measures_norms
        arrival = Arrival(
            stored,
            has_sums=of_segment.memory_beside_masters.has_sums,
            is_updated_on_device=updates_on_device and is_complete and steps_next,
            is_used_at_once=early is not None and not early.keeps_gradients,
        )
        route = route_of(arrival)
        is_first = stored is Stored.NOWHERE and route in (Route.ADD, Route.KEEP)
        may_wait = is_first and self.averages is None and not accumulates_in_grad
        if may_wait and self._waiting.admits(of_segment, more_comes=not steps_next):
            route = Route.STAY
        self.routes.send(of_segment, route, more_comes=not steps_next)
        if early is not None:
            early.step_with(of_segment)

    def bytes_on_device(self) -> int:
        """Return the bytes of gradients that stay on the device."""
        known = self.gradient_of.values()
        return sum(
            gradient.tensor.nbytes for gradient in known if gradient.tensor is not None and gradient.is_on_device
        )

    # ------------------------------------------------------------------------------------------- when backward ends

    @torch.no_grad()
    def end_backward(self) -> bool:
        """Send the remaining gradients, and call users' hooks; tell whether any gradient has come."""
        self.send_others()
        if self.pending and self.averages is not None:
            self.averages.send_rest(self.early_step)
        some_came = bool(self.pending)
        seen = [gradient for gradient, accumulates_in_grad in self.pending.items() if accumulates_in_grad]
        self.pending.clear()
        self._accumulate(seen)
        return some_came

    def _accumulate(self, gradients: Iterable[Gradient]) -> None:
        """Add gradients that users see to `.grad`, and call users' hooks, in the order in which autograd would."""
        for gradient in gradients:
            master = gradient.weight.master
            added = gradient.take()
            if added is None:  # it was dropped meanwhile
                continue
            added = run_hooks(tensor_hooks(master), added)
            if master.grad is None:
                master.grad = added
            else:
                master.grad.add_(added.to(master.grad.device))
            for hook in list((master._post_accumulate_grad_hooks or {}).values()):
                hook(master)

    def abandon(self) -> None:
        """Forget the gradients of a backward pass that an exception has ended."""
        for of_segment in self._by_segment:
            of_segment.abandon()
        for gradient, accumulates_in_grad in self.pending.items():
            if accumulates_in_grad:
                gradient.drop()
        self.pending.clear()
        self.routes.landing.release_all()

    # ------------------------------------------------------------------- between one backward pass and the next

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        waits = False
        for of_segment in self._by_segment:
            if of_segment.ticket is not None and of_segment.stored is not Stored.NOWHERE:
                waits = True
                of_segment.wait()
        if waits:
            self._window.stats.host_syncs += 1

    def show_all(self) -> None:
        """Make all gradients the masters' `.grad`."""
        for of_segment in self._by_segment:
            of_segment.show()

    def consume(self, gradients: Collection[Gradient]) -> None:
        """Drop the engine's gradients that a step has used; a user's `.grad` stays until the user zeroes it."""
        for gradient in gradients:
            if gradient.tensor is not None:
                gradient.weight.gradient_life = GradientLife.SPENT
            gradient.drop()

    def drop_used(self, on_host_too: bool = True) -> None:
        """Drop gradients that an optimizer has used, and that were not zeroed since.

        Those on the device leave as the next step begins, which needs the memory. Those on the host stay for a loop
        that adds to them, until weights get other places.
        """
        gradients = self.gradient_of.values()
        used = [gradient for gradient in gradients if gradient.weight.gradient_life is GradientLife.USED]
        self.consume([gradient for gradient in used if on_host_too or gradient.is_on_device])

    def forget(self) -> None:
        """Forget all gradients, whatever state they are in: an interrupt may have come between two of their notes."""
        self.pending.clear()
        for of_segment in self._by_segment:
            of_segment.forget()

    def hand_over_gradients(self) -> None:
        """Make all gradients the masters' `.grad`, and release buffers, but not units' own memory next to masters."""
        self.abandon()
        self.show_all()
        for of_segment in self._by_segment:
            of_segment.memory_beside_masters.forget()
            of_segment.norms_on_device = None
        self.routes.staging.drop_buffers()
        self.routes.landing.free_memory()


def refusal(weight: Weight, tensor: Tensor) -> RuntimeError:
    """Make the error for a gradient that cannot be sent."""
    if tensor.requires_grad:
        return RuntimeError(
            "backward(create_graph=True) would leave a gradient with a graph on weight "
            f"{weight.name!r}, whose gradient is in CPU memory. Use torch.autograd.grad(..., "
            "create_graph=True) for the inner gradient."
        )
    if tensor.layout is not torch.strided:
        return RuntimeError(
            f"Weight {weight.name!r} got a sparse gradient. Make it dense (`sparse=False`, "
            "`to_dense()`), or compute it in an `nn.Embedding(sparse=True)`, which stays on the "
            "GPU."
        )
    return RuntimeError(
        f"Weight {weight.name!r} got another gradient after it was updated in this backward pass. "
        "Train with `overlap_optimizer=False`."
    )
