"""Steps, and the calls of modules in them: what the engine does around each, and when backward reaches what it made.

[Note: one step]
A scope of `step()` is open, in which masters are guarded, and weights on the device are checked against them before
use. A call *enters* its unit: the unit is brought to the device, twins take the masters' place in the module tree, and
copies are started for what comes next, by the order of uses. It *leaves* it: masters are put back, and the place may be
given to others. The node that made its output has a hook, by which backward *reaches* the unit again. Other signs of
backward are the weights that it unpacks, and recomputation; it leaves all units when it ends.

    order -> window -> lanes -> device -> autograd -> gradients -> optimizer -> host
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from sp_lightning.pipeline.calls.backward import BackwardPass
from sp_lightning.pipeline.calls.gates import open_steps
from sp_lightning.pipeline.calls.graphs import CallToCome, before_backward, nodes_of
from sp_lightning.pipeline.calls.running_call import RunningCall
from sp_lightning.pipeline.lanes.at_work import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.operands import autocast_dtype
from sp_lightning.pipeline.optimizer.visit import Visit
from sp_lightning.pipeline.torch_private import in_backward, in_transform, is_capturing
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.overrides import running_calls
from sp_lightning.pipeline.window.order import Pass

if TYPE_CHECKING:
    from sp_lightning.pipeline.engine import Engine

_MILLISECONDS = 50  # that a thread waits for another one's backward to end


class Calls:
    """Opens and closes steps, and runs the calls of modules in them."""

    leaves_steps_open = False  # whether a call's step goes on after it (see gates.py)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside: list[RunningCall] = []  # calls that are running, innermost last

    # -------------------------------------------------------------------------------------------------------- a step

    @contextmanager
    def step(self, look_for_new_parameters: bool = False, goes_on: bool = False) -> Iterator[None]:
        """Open a scope, which begins a step if it is not within another; or the last one `goes_on`, with a backward."""
        engine = self._engine
        graphs = engine.graphs
        if graphs.scopes == 0:
            optimizer_steps.depth = 0  # torch tells nobody of a step that ended with an exception
        # an optimizer gets here by a closure, maybe by one that torch's step hooks do not see
        with optimizer_waits():
            if graphs.scopes == 0:
                self._begin_step(look_for_new_parameters, goes_on)
            graphs.scopes += 1
            try:
                with engine.saved.pushed():
                    yield
            except BaseException:
                if graphs.scopes == 1 and not in_backward():
                    self.abandon()
                raise
            finally:
                if graphs.scopes:
                    graphs.scopes -= 1
                    if graphs.scopes == 0 and not in_backward():
                        with engine.at_work:
                            engine.window.write_back_all()
                        graphs.begin()  # whoever still holds the old graph waits for its backward
                    engine.relax_guard()

    def _begin_step(self, look_for_new_parameters: bool, goes_on: bool) -> None:
        engine = self._engine
        if in_backward():
            engine.backward.note()
            return
        if engine.backward.running or self._inside:
            self.abandon()  # a backward outside of any scope ended with an exception
        goes_on |= engine.graphs.waiting()  # this is the backward of the previous step
        engine.graphs.has_served = False
        engine.before_step(look_for_new_parameters, goes_on)
        if not goes_on:
            engine.optimizers.drop_used()
            engine.stats.steps += 1
            engine.backend.trace.begin_step()
            engine.activations.begin_step()
            engine.order.begin_step()
            for unit in engine.window.units:
                unit.readers.has_aliases = unit.readers.has_raw_readers = False
        engine.arrangement.unused_in_step = not goes_on
        engine.arm_guard()
        with engine.at_work:
            if not goes_on and torch.is_grad_enabled():
                engine.stream.routes.staging.reserve()
            engine.window.begin_step()

    @contextmanager
    def _step_of_call(self) -> Iterator[None]:
        """Open the step of a call that is in none, or in one that was left open; leave it open if it may be."""
        graphs = self._engine.graphs
        if self in open_steps.models and not open_steps.calls:
            graphs.begin()
            if not graphs.waiting():  # its backward is over, or will never come
                with open_steps.ending():
                    pass
        begins = self.leaves_steps_open and torch.is_grad_enabled() and graphs.scopes == 0
        if begins and not in_backward() and open_steps.may_begin():
            open_steps.begin(self, self.step(look_for_new_parameters=True))
        open_steps.calls += 1
        try:
            with self.step():
                yield
        except BaseException:
            if self in open_steps.models:
                with open_steps.ending():
                    raise
            raise
        finally:
            open_steps.calls -= 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have this thread compute with the model in the block, and no other one."""
        at_work, backward = self._engine.at_work, self._engine.backward
        if in_backward() or at_work.computes == get_ident():
            yield
            return
        for _ in range(_MILLISECONDS):
            backward.forget_failed()
            if not backward.running or at_work.goes_on == get_ident():
                break
            time.sleep(0.001)  # what a failed pass has held goes in a thread of autograd's
        with at_work:
            at_work.refuse_others()
            at_work.goes_on = None  # it has ended with an exception
            at_work.computes = get_ident()
        try:
            yield
        finally:
            at_work.computes = None

    def _needs_step(self) -> bool:
        """Tell whether a call is the outermost one."""
        is_outermost = self._engine.at_work.computes != get_ident() and not in_backward()
        return is_outermost or self._engine.graphs.scopes == 0 or optimizer_steps.depth > 0

    def abandon(self) -> None:
        """Recover from an exception in the middle of a step: nothing is in flight, and the next step can begin."""
        engine = self._engine
        engine.graphs.scopes = 0
        if engine.at_work.is_forked:  # the exception, SystemExit say, is all that matters there
            return
        with engine.at_work:
            engine.stats.resets += 1
            self._inside.clear()
            for member in engine.arrangement.members:
                member.running_calls = 0
                member.put_back_masters()
            engine.backward.abandon()
            engine.backend.trace.end()
            engine.backend.drain()
            engine.offloader.abandon()
            engine.order.abandon()
            engine.window.abandon()
            engine.planner.abandon()
            engine.graphs.begin()
            engine.relax_guard()

    # --------------------------------------------------------------------------------------------------------- a call

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a member's module with its weights on the device (see gates.py)."""
        engine = self._engine
        if is_capturing():
            raise RuntimeError(
                "A module that superpipeline streams cannot be captured as a graph (by "
                "`torch.jit.trace`, `torch.export`, `torch.onnx.export`, `torch.fx`): the graph "
                "would keep the weights of one moment. Capture `copy.deepcopy(module).cpu()`, "
                "which is plain, or capture before or after the run."
            )
        if in_transform() and (member.is_streamed or engine.graphs.scopes == 0):
            raise RuntimeError(
                f"{member.name or 'the model'!r}, whose weights are streamed, is called within a "
                "transform of `torch.func`. Name the modules that it calls in `resident=`, within "
                "a step. To differentiate, use `torch.autograd.grad`."
            )
        if self._needs_step():
            with self.alone(), self._step_of_call():
                return member.module(*args, **kwargs)  # perhaps as a member of another unit
        if member.unit is None:
            # nn.TransformerEncoder decides on a fast path by its first layer's weights: it must see ordinary ones
            with engine.at_work:
                member.put_in_twins(engine.backward.follow_requires_grad)
            try:
                return forward(*args, **kwargs)
            finally:
                member.put_back_masters()
        autocast = autocast_dtype(engine.device.type)
        if autocast is not member.autocast:
            engine.adapt_to_autocast(member, autocast)
        if member.compiled is not None and member.module._compiled_call_impl is None:
            forward = member.compiled
        compute = partial(forward, *args, **kwargs)
        activations = engine.activations
        if activations.are_kept or not activations.manages(member):
            return self._run(member, compute, autocast)
        # the outermost call of a unit, whose saved tensors have a policy of their own
        with engine.at_work:
            for unit in member.needed:
                # later, the end of a step, or a visit's beginning, would look like a write by the forward
                if isinstance(unit.being_stepped, Visit):
                    engine.window.bring(unit)
                else:
                    engine.window.finish_optimizer(unit)
        try:
            activations.begin(member, args, kwargs)
            output = self._run(member, compute, autocast)
            activations.conclude(output)
            return output
        finally:
            activations.end()

    def _run(self, member: Member, compute: Callable[[], Any], autocast: torch.dtype | None) -> Any:
        # A forward that builds no graph casts weights for each use: the cache would keep those of all units.
        uncached = autocast is not None and not torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
        call = self._enter(member)
        running = running_calls.stack
        running.append(call)
        try:
            if uncached:
                torch.set_autocast_cache_enabled(False)
            with self._engine.saved.pushed():
                # not a variable here: a view of a weight, which is cloned, would still be held when the call is left
                return self._announce(call, compute())
        finally:
            running.pop()
            if uncached:
                torch.set_autocast_cache_enabled(True)
            self._leave(member)

    def _enter(self, member: Member) -> RunningCall:
        """Bring what a call needs, put it in its place, and return the call.

        What may raise comes first: the call has not begun then, and the user may go on with the step.
        """
        engine = self._engine
        backward = engine.backward
        is_backward = in_backward()
        with engine.at_work:
            engine.graphs.calls += 1
            number = engine.graphs.calls
            engine.arrangement.unused_in_step = False
            member.entered += 1
            if backward.running and not is_backward:
                # it ended with an exception that the user caught within the step
                backward.abandon()
            if member.is_streamed:
                forward = Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE
                engine.order.visit(member.index, Pass.BACKWARD if is_backward else forward)
            if self._inside:
                engine.guard.unblock(member)
            if is_backward and any(unit.is_used_up for unit in member.needed):
                for entry in member.entries:
                    engine.guard.refuse_if_stepped(entry.weight)
            for unit in member.needed:
                engine.window.bring(unit)
            if member.calls_to_watch[member.module.training]:
                member.calls_to_watch[member.module.training] -= 1
                for unit in member.needed:
                    unit.watch()
            engine.window.prefetch([*member.needed, *backward.in_use])
            if member.is_streamed and not engine.activations.are_kept:
                engine.activations.enter(member)
            for unit in member.needed:
                unit.users += 1
            member.running_calls += 1
            for outer in self._inside:
                member.called_in.update(outer.needed)
            call = RunningCall(member, member.needed, number, engine.arrangement.twins)
            self._inside.append(call)
            member.put_in_twins(backward.follow_requires_grad)
            if len(self._inside) == 1 and not is_backward:
                engine.backend.trace.begin(Kind.FORWARD, member.unit_name)
            return call

    def _leave(self, member: Member) -> None:
        engine = self._engine
        backward = engine.backward
        if engine.at_work.is_forked:
            return
        with engine.at_work:
            if not member.running_calls:  # an exception inside the call led to a reset
                return
            member.running_calls -= 1
            for unit in self._inside.pop().needed:
                unit.users -= 1
                if unit.fingerprint is not None and not unit.users:
                    engine.window.find_unseen_writes(unit)
            is_backward = in_backward()
            if not self._inside and not is_backward:
                engine.backend.trace.end()
            for entry in member.entries:
                twin = entry.weight.twin
                # the forward has frozen or thawed it
                if twin.parameter.requires_grad != entry.weight.master.requires_grad:
                    entry.weight.master.requires_grad_(twin.parameter.requires_grad)
                    backward.follow_requires_grad(twin)
            for unit in member.needed:
                if unit.readers.has_aliases:  # which show what the forward has written
                    engine.window.write_back(unit.weights)
            if not (member.running_calls or (member.unit and member.unit.is_reached)):
                member.put_back_masters()
            if member.is_streamed and not engine.activations.are_kept:
                engine.activations.leave()
            engine.window.prefetch([*member.needed, *backward.in_use] if is_backward else ())

    # --------------------------------------------------------------------------------------------------- its backward

    def _announce(self, call: RunningCall, output: Any) -> Any:
        """Have backward announce itself when it reaches this call, and clone outputs that lie in a place."""
        engine, graphs = self._engine, self._engine.graphs
        output, tensors = call.outside_of_places(output)
        nodes = call.nodes + nodes_of([tensor for tensor in tensors if tensor.requires_grad])
        if nodes:
            graphs.current.is_built = True
            # none if all are kept
            bundle = engine.offloader.open[-1] if engine.offloader.open else None
            to_come = CallToCome(call.member, graphs.current, call.needed, bundle)
            action = partial(BackwardPass.reach, ref(engine), to_come)
            before_backward(nodes, action, call.number, graphs.calls)
        return output
