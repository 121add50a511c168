"""The story of a step: what each part of the engine does at each of its events.

    begin_step          weights may get other places; what the step needs first is sent
    enter_call          a unit is brought to the device, and leaves stand in for masters in the module tree
    leave_call          masters are put back, and the unit's place may be given to another unit
    watch_output        the node that made a call's output gets a hook, by which backward announces itself
    guard_masters       backward begins, and masters are guarded
    before_backward     backward is about to run the nodes of a call, whose unit is brought back
    end_backward        gradients have come; those of other processes are added
    end_step            the forward's writes to weights go to their masters
    abandon             an exception has ended any of these

[Note: one step]
A scope of `step()` is open, in which masters are guarded, and weights on the device are checked against them before
use. A call *enters* its unit, and starts copies of what comes next, by the order of uses. The call *leaves* the unit.
Backward *reaches* it again by the hook on the output's node. Other signs of backward are the weights that it unpacks,
and recomputation; it leaves all units when it ends.

    order -> window -> lanes -> device -> autograd -> gradients -> optimizer -> host

Gradients go their own way from the leaf's hook on (backward.py, gradients/stream.py), and so do the steps of optimizers
(optimizer/optimizers.py).
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sp_lightning.pipeline.calls.backward import CallToCome, RunningCall, before_backward, nodes_of
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.graphs import Opener
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.placing.placement import PlacementPolicy
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.weight import outdated_graph_error
from sp_lightning.pipeline.window.window import Pass


class Story:
    """Tells the parts of an engine what happens in a step.

    Attributes:
        running: The calls under way, innermost last.
        at_work: The scope of the engine's own work.
        graphs: The graphs that wait for their backward.
        activations: Decides about saved tensors.
        placement: Decides when weights get other places.
        backward: The backward pass under way.
    """

    def __init__(self, engine: Engine) -> None:
        self.running: list[RunningCall] = []
        self.at_work = engine.at_work
        self.graphs = engine.graphs
        self.activations = engine.activations
        self.placement = PlacementPolicy(engine)
        self._engine = engine

    def follow_arrangement(self) -> None:
        """Work from now on with the parts that belong to the engine's arrangement of the module."""
        engine = self._engine
        self._arrangement = engine.arrangement
        self._window = engine.window
        self._stream = engine.stream
        self.backward = engine.backward
        self._guard = engine.guard
        self._trace = engine.backend.trace

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, opener: Opener) -> None:
        """Begin a step, or a scope that continues the last one with another backward."""
        # A graph that waits has its backward in this scope.
        continues_last_step = opener is Opener.LAST_STEP or self.graphs.waiting()
        self.graphs.has_served = False
        if not continues_last_step:
            with self.at_work:
                self._stream.drop_used(on_host_too=False)
        self.placement.before_step(opener, continues_last_step)
        if not continues_last_step:
            self._trace.mark_step()
            self.activations.begin_step(counts=self._engine.waiting.is_left_to_backward)
            self._window.begin_next_step()
        self._arrangement.unused_in_step = not continues_last_step
        self.guard_masters()
        with self.at_work:
            if not continues_last_step and torch.is_grad_enabled():
                self._stream.routes.staging.reserve()
            self._window.load_first()

    def end_step(self) -> None:
        """End the step, unless backward runs, which ends it later."""
        if in_backward():
            return
        with self.at_work:
            self._window.write_back_all()
            self.placement.end_step()
        self.graphs.begin_graph()  # the old graph may still wait for its backward

    def guard_masters(self) -> None:
        """Begin a step or a backward pass: guard masters, and have weights on the device checked before use."""
        if not self._guard.in_step:
            self._window.suspect_all()
            self._guard.in_step = True

    def relax_guard(self) -> None:
        """Relax the guard, once neither a step nor a backward pass is under way."""
        if not (self.graphs.scopes or self.backward.running):
            self._guard.end_step()

    def fail(self) -> None:
        """Abandon this thread's backward pass, which has ended with an exception; outside of a step, all else, too."""
        if self.backward.running and self.at_work.continuing_thread == get_ident():
            if not self.graphs.scopes:
                self.abandon()
                return
            with self.at_work:  # the program may catch the exception, and go on with the step
                self.backward.abandon()

    def abandon(self) -> None:
        """Recover from an exception in the middle of a step: nothing is in flight, and the next step can begin."""
        self.graphs.scopes = 0
        if self.at_work.is_forked:  # only the exception matters in a fork, such as SystemExit
            return
        with self.at_work:
            self._window.stats.resets += 1
            self.running.clear()
            for member in self._arrangement.members:
                member.running_calls = 0
                member.put_back_masters()
            for weight in self._arrangement.weights:
                weight.leaf_count = 0
            self.backward.abandon()
            self._trace.end_computing()
            self._window.backend.drain()
            self._engine.offloader.abandon()
            self._window.order.forget_position()
            self._window.mark_all_absent()
            self._engine.planner.abandon()
            self.graphs.begin_graph()
            self.relax_guard()

    # ---------------------------------------------------------------------------------------------------------- a call

    def finish_steps(self, member: Member) -> None:
        """Wait for optimizer steps of what a call needs: later, such a step would look like a write by the forward."""
        with self.at_work:
            for unit in member.needed:
                if unit.update.ticket is not None and unit.update.ticket.steps_on_device:
                    self._window.bring(unit)
                else:
                    self._window.finish_optimizer(unit)

    def enter_call(self, member: Member) -> RunningCall:
        """Bring what a call needs, put leaves in place of masters, and return the call.

        The parts that may raise come first: the call has not begun then, and the user may go on with the step.
        """
        is_backward = in_backward()
        with self.at_work:
            self.graphs.calls += 1
            self._arrangement.unused_in_step = False
            member.entered += 1
            self._bring_for_call(member, is_backward)
            if member.is_streamed and not self.activations.are_kept:
                self.activations.enter(member)
            for unit in member.needed:
                unit.users += 1
            member.running_calls += 1
            for outer in self.running:
                member.called_in.update(outer.needed)
            call = RunningCall(member, self.graphs.calls, is_backward, self._arrangement.twins)
            self.running.append(call)
            member.put_in_twins(self.backward.follow_requires_grad)
            if len(self.running) == 1 and not is_backward:
                self._trace.begin_computing(Kind.FORWARD, member.unit_name)
            return call

    def _bring_for_call(self, member: Member, is_backward: bool) -> None:
        """Make the weights that a call needs readable, and start copies of what comes next."""
        window = self._window
        if member.is_streamed:
            forward = Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE
            window.order.record_use(member.index, Pass.BACKWARD if is_backward else forward)
        if self.running:
            self._guard.unblock(member)  # this may change the units that the member needs
        needed = member.needed
        if is_backward and any(unit.update.is_stepped_in_backward for unit in needed):
            for entry in member.entries:
                self._guard.refuse_if_stepped(entry.weight)
        for unit in needed:
            window.bring(unit)
        if needed and member.calls_to_watch[member.module.training]:
            member.calls_to_watch[member.module.training] -= 1
            for unit in needed:
                unit.presence.watch()
        window.prefetch([*needed, *self.backward.in_use])

    def watch_output(self, call: RunningCall, output: Any) -> Any:
        """Have backward announce itself when it reaches this call, and clone outputs that lie in a place."""
        graphs = self.graphs
        output, tensors = call.outside_of_places(output)
        nodes = call.nodes + nodes_of([tensor for tensor in tensors if tensor.requires_grad])
        if nodes:
            graphs.current.is_built = True
            call_to_come = CallToCome(call, graphs.current, self.activations.open_bundle)
            action = partial(_before_backward, ref(self), call_to_come)
            before_backward(nodes, action, call.number, graphs.calls)
        return output

    def leave_call(self, member: Member) -> None:
        """Put masters back after a call, or its exception, and start copies of what comes next."""
        if self.at_work.is_forked:
            return
        with self.at_work:
            if not member.running_calls:  # an exception inside the call led to a reset
                return
            member.running_calls -= 1
            call = self.running.pop()
            for unit in call.needed:
                unit.users -= 1
                if unit.presence.fingerprint is not None and not unit.users:
                    self._window.find_unseen_writes(unit)
            if not self.running and not call.is_backward:
                self._trace.end_computing()
            for entry in member.entries:  # the forward may have frozen or thawed a leaf
                twin, master = entry.weight.twin, entry.weight.master
                if twin.parameter.requires_grad != master.requires_grad:
                    master.requires_grad_(twin.parameter.requires_grad)
                    self.backward.follow_requires_grad(twin)
            for unit in member.needed:
                if unit.readers.has_aliases:  # aliases of masters show the forward's writes
                    self._window.write_back(unit.weights)
            if not (member.running_calls or (member.unit and member.unit.is_reached)):
                member.put_back_masters()
            if member.is_streamed and not self.activations.are_kept:
                self.activations.leave()
            self._window.prefetch([*member.needed, *self.backward.in_use] if call.is_backward else ())

    # ------------------------------------------------------------------------------------------------------- backward

    def before_backward(self, member: Member, call: CallToCome) -> None:
        """Bring a unit back: backward is about to run the nodes of a member's call ([Note: before backward])."""
        call.end()
        self._check_graph(member, call)
        backward, window, unit = self.backward, self._window, member.unit
        assert unit is not None
        with self.at_work:
            backward.note_sign()
            if member.is_streamed:
                window.order.record_use(member.index, Pass.BACKWARD)
                self._stream.send_others(unit)
            for needed_unit in call.needed:
                window.bring(needed_unit)
            backward.mark_reached(unit, call.graph)
            # checkpoints inside of the unit call its parts, and not the unit
            if unit.resident:
                member.put_in_twins(backward.follow_requires_grad)
                return
            for other in unit.members:  # those that need no other weights than these get leaves
                has_weights = all(needed in call.needed or needed.presence.is_valid for needed in other.needed)
                if has_weights and not unit.update.is_stepped_in_backward:
                    other.put_in_twins(backward.follow_requires_grad)
            # The backward of calls around this one is not over either.
            backward.in_use = [*call.needed, *member.called_in]
            window.prefetch(backward.in_use)
        self._trace.begin_computing(Kind.BACKWARD, member.unit_name)
        if not self.activations.are_kept:
            self.activations.reach(call.bundle)

    def _check_graph(self, member: Member, call: CallToCome) -> None:
        """Raise if a call's graph cannot have a backward now."""
        if call.graph.outdated:  # aliases that it may have lie where weights were
            raise outdated_graph_error(f"unit {member.unit_name!r}")
        if member.is_streamed and torch.is_grad_enabled() and self.graphs.scopes == 0:
            raise RuntimeError(
                "A backward pass with create_graph=True will need the weights once more. Surround "
                "forward and backward with `with pipeline.step():`."
            )

    def end_backward(self, some_came: bool) -> None:
        """Follow the end of a backward pass, which may have brought gradients."""
        self.graphs.has_served = False
        self._trace.end_computing()
        self.activations.end_backward()
        if not self.graphs.scopes:
            self._window.write_back_all()
            self.graphs.begin_graph()  # checkpoints have built a graph, which has had its backward
        # This does not follow `torch.autograd.grad`, which may run in some processes only.
        if self._engine.has_gradients_on_device() or some_came:
            self.add_up_with_others()
        self.relax_guard()

    def abandon_backward(self) -> None:
        """Follow an exception that has ended a backward pass, or the work after it."""
        if self._stream.averages is not None:
            self._stream.averages.abandon_pass()
        # Steps end before the memory that they read is given to others.
        self._engine.optimizers.abandon()

    def add_up_with_others(self) -> None:
        """Add gradients up with those of other processes, if the model is trained by several."""
        averages = self._stream.averages
        if averages is not None:
            with self.at_work:
                averages.end_pass(self._arrangement.named_on_device)


def _before_backward(story_ref: ref[Story], call: CallToCome, _gradients: tuple[Tensor, ...]) -> None:
    """Tell the story, unless it or the module is gone ([Note: what nodes hold]); if it matters, unpacking raises."""
    story, member = story_ref(), call.member()
    if story is not None and member is not None:
        story.before_backward(member, call)
