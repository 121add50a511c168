"""The calls of members: what the engine does around each one, and when backward reaches what it computed.

A call *enters* its unit: the group is brought to the device, twins take the masters' place in the module tree, and
copies are started for what comes next. It *leaves* it: masters are put back, and the slot may be reused. The node that
made its output gets a hook that announces its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.offload import Bundle, Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.backward import BackwardPass
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.outside import OutsideUse
from sp_lightning.pipeline.torch_private import in_backward, storage_key
from sp_lightning.pipeline.weights.graphs import Announcement, Graph, Graphs, before_backward
from sp_lightning.pipeline.weights.guard import EngineAtWork
from sp_lightning.pipeline.weights.operands import replace_instances, tensors_in
from sp_lightning.pipeline.weights.order import Pass
from sp_lightning.pipeline.weights.units import Group, Member
from sp_lightning.pipeline.weights.window import Window


class Calls:
    """Runs the calls of an arrangement's members during a step."""

    def __init__(
        self,
        arrangement: Arrangement,
        graphs: Graphs,
        saved: SavedTensors,
        activations: Activations,
        offloader: Offloader,
        window: Window,
        backward: BackwardPass,
        outside: OutsideUse,
        at_work: EngineAtWork,
    ) -> None:
        self._arrangement = arrangement
        self._backend = window.backend
        self._graphs = graphs
        self._saved = saved
        self._activations = activations
        self._offloader = offloader
        self._at_work = at_work
        self._window = window
        self._order = window.order
        self._backward = backward
        self._outside = outside
        self._inside: list[list[Group]] = []  # the groups that each running call computes with, innermost call last

    def run(
        self,
        member: Member,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> Any:
        """Run a module's call, without the gate around it, with its weights on the device."""
        if member.unit is None:
            return self._run_around_units(member, forward, args, kwargs)
        if self._activations.are_kept or not self._activations.manages(member):
            return self._run(member, forward, args, kwargs, autocast)
        # the outermost call of a unit, whose saved tensors have a policy of their own
        self._finish_optimizer(member)  # later, their end would look like a write by the forward
        try:
            self._activations.begin(member, args, kwargs)
            output = self._run(member, forward, args, kwargs, autocast)
            self._activations.conclude(output)
            return output
        finally:
            self._activations.end()

    def _run(
        self,
        member: Member,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> Any:
        if autocast is not None and not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
            forward = _without_autocast_cache(forward)
        number = self._enter(member, autocast)
        pushed = False
        try:
            self._begin(member)
            pushed = self._saved.push()
            # not a variable here: a view of a weight, which is cloned, would still be held when the call is left
            return self._announce(member, forward(*args, **kwargs), number)
        finally:
            if pushed:
                self._saved.pop()
            self._leave(member)

    def abandon(self) -> None:
        """Clean up after an exception has ended all calls."""
        for member in self._arrangement.members:
            member.running_calls = 0
            member.put_back_masters()
        self._inside.clear()

    # --------------------------------------------------------------------------------------------------------- a call

    def _finish_optimizer(self, member: Member) -> None:
        with self._at_work:
            for group in member.groups:
                self._window.finish_optimizer(group)

    def _enter(self, member: Member, autocast: torch.dtype | None) -> int:
        """Bring what a call needs, and return the call's number."""
        with self._at_work:
            self._graphs.calls += 1
            number = self._graphs.calls
            self._arrangement.unused_in_step = False
            member.entered += 1
            direction = _direction()
            if self._backward.running and direction is not Pass.BACKWARD:
                self._backward.abandon()  # it ended with an exception that the user caught within the step
            if member.is_streamed:
                self._order.visit(member.index, direction)
            if self._arrangement.compiled and autocast is not None:
                self._outside.note_compiled_call(member)
            self._outside.unblock(member)
            for group in member.groups:
                self._window.bring(group)
            for group in member.groups:
                group.users += 1
            member.running_calls += 1
            if self._inside:
                member.called_in.update(*self._inside)
            self._inside.append(member.groups)
            if member.is_streamed and not self._activations.are_kept:
                self._activations.enter(member)
            return number

    def _begin(self, member: Member) -> None:
        """Put weights in their places."""
        with self._at_work:
            member.put_in_twins(self._backward.follow_requires_grad)
            self._window.prefetch(self._backward.in_use)
            if len(self._inside) == 1 and not in_backward():
                self._backend.trace.begin(Kind.FORWARD, member.unit_name)

    def _leave(self, member: Member) -> None:
        with self._at_work:
            if not member.running_calls:  # an exception inside the call led to a reset
                return
            member.running_calls -= 1
            for group in self._inside.pop():
                group.users -= 1
            is_backward = in_backward()
            if not self._inside and not is_backward:
                self._backend.trace.end()
            for entry in member.entries:
                self._backward.adopt_requires_grad(entry.weight.twin)
            if not member.running_calls and not (member.unit is not None and member.unit.is_reached):
                member.put_back_masters()
            if member.is_streamed and not self._activations.are_kept:
                self._activations.leave()
            self._window.prefetch([*member.groups, *self._backward.in_use] if is_backward else ())

    def _run_around_units(
        self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if member.looks_into is None:
            return forward(*args, **kwargs)
        # nn.TransformerEncoder inspects its first layer's weights to decide on a fast path: it must see ordinary ones.
        with self._at_work:
            member.looks_into.put_in_twins(self._backward.follow_requires_grad)
        try:
            return forward(*args, **kwargs)
        finally:
            member.looks_into.put_back_masters()

    # --------------------------------------------------------------------------------------------------- its backward

    def _announce(self, member: Member, output: Any, number: int) -> Any:
        """Have backward announce itself when it reaches this call, and clone outputs that lie in a slot."""
        tensors = tensors_in(output)
        if any(map(self._lies_in_a_slot, tensors)):
            output = replace_instances(output, Tensor, lambda it: it.clone() if self._lies_in_a_slot(it) else it)
            tensors = tensors_in(output)
            if any(map(self._lies_in_a_slot, tensors)):
                raise RuntimeError(
                    f"superpipeline: {member.name!r} returns one of its weights in an object of a class of its own. "
                    "Return a clone of the weight, or name it in `resident`."
                )
        if torch.is_grad_enabled() and (watched := [tensor for tensor in tensors if tensor.requires_grad]):
            before_backward(watched, self._announcement(member), number, self._graphs.calls)
        return output

    def _lies_in_a_slot(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._arrangement.twins

    def _announcement(self, member: Member) -> Announcement:
        """Return what to do when backward reaches the call that is ending."""
        graph = self._graphs.watch_current()
        if not member.is_streamed:
            return self._graphs.announce(partial(self._backward.note_graph, graph))
        *outer, groups = self._inside
        around = [group for each in outer for group in each]
        if in_backward():  # the call that it was inside of is over, but the backward of that is not
            around += [group for group in self._backward.in_use if group in member.called_in]
        bundle = None if self._activations.are_kept else self._offloader.current
        return self._graphs.announce(partial(self._reach, member, graph, groups, around, bundle))

    def _reach(
        self,
        member: Member,
        graph: Graph,
        groups: list[Group],
        around: list[Group],
        bundle: Bundle | None,
        _gradients: object,
    ) -> None:
        """Bring a unit back: backward is about to run the nodes of its call ([Note: before backward] in graphs.py)."""
        if self._backward.closed:
            return  # if it matters, unpacking raises
        if torch.is_grad_enabled() and not self._graphs.in_step:
            raise RuntimeError(
                "A backward pass with create_graph=True will need the weights once more. Surround forward and backward "
                "with `with pipeline.step():`."
            )
        self._backward.reach(member, graph, groups, around)
        if self._activations.auto is not None:
            self._activations.auto.reach()
        self._backend.trace.begin(Kind.BACKWARD, member.unit_name)
        if bundle is not None:
            self._offloader.reach(bundle)


def _direction() -> Pass:
    if in_backward():
        return Pass.BACKWARD
    return Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE


def _without_autocast_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have a forward that builds no graph cast weights for each use: the cache would keep those of all units."""

    def uncached(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(True)

    return uncached
