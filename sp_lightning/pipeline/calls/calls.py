"""Scopes of steps and the calls of modules in them: which call opens a step or enters a unit; which thread computes.

story.py tells what happens at each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from sp_lightning.pipeline.calls.gates import open_steps
from sp_lightning.pipeline.calls.story import Story
from sp_lightning.pipeline.graphs import Opener
from sp_lightning.pipeline.lanes.at_work import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.operations import Args, Kwargs, Operation, autocast_dtype
from sp_lightning.pipeline.torch_private import (
    DDP_AVERAGES_NOTHING,
    active_ddp,
    in_backward,
    in_transform,
    is_capturing,
)
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.leaf import running_calls


class Calls:
    """Opens and closes steps, and runs the calls of modules in them.

    Args:
        story: Tells the parts of the engine what happens.
        device: The device that computes.
        leaves_steps_open: Whether a call's step goes on after it (see gates.py).
    """

    def __init__(self, story: Story, device: torch.device, leaves_steps_open: bool) -> None:
        self._story = story
        self._device = device
        self._leaves_steps_open = leaves_steps_open

    # -------------------------------------------------------------------------------------------------------- a step

    @contextmanager
    def step(self, opener: Opener = Opener.CALL) -> Iterator[None]:
        """Open a scope; the outermost one begins a step, or continues the backward of the last one."""
        graphs = self._story.graphs
        if graphs.scopes == 0:
            # Torch does not report an optimizer step that ended with an exception.
            optimizer_steps.depth = 0
        # An optimizer may call a closure that computes, also an optimizer that torch's step hooks do not see.
        with optimizer_waits():
            if graphs.scopes == 0:
                self._begin_scope(opener)
            graphs.scopes += 1
            try:
                with self._story.activations.saved.pushed():
                    yield
            except BaseException:
                if graphs.scopes == 1 and not in_backward():
                    self._story.abandon()
                raise
            finally:
                if graphs.scopes:
                    graphs.scopes -= 1
                    if graphs.scopes == 0:
                        self._story.end_step()
                    self._story.relax_guard()

    def _begin_scope(self, opener: Opener) -> None:
        """Begin a step, unless a backward pass under way has begun it."""
        if in_backward():
            self._story.backward.note_sign()
            return
        if self._story.backward.running or self._story.running:
            self._story.abandon()  # a backward outside of any scope has ended with an exception
        self._story.begin_step(opener)

    @contextmanager
    def _step_of_call(self) -> Iterator[None]:
        """Open a step for a call, unless it is within one; where calls leave their steps open, leave it open."""
        graphs = self._story.graphs
        if self in open_steps.models and not open_steps.calls:
            graphs.begin_graph()
            if not graphs.waiting():  # the open step's backward is over, or will never come
                with open_steps.ending():
                    pass
        stays_open = self._leaves_steps_open and torch.is_grad_enabled() and graphs.scopes == 0
        if stays_open and not in_backward() and open_steps.may_begin():
            open_steps.open_step(self, self.step(Opener.PROGRAM))
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
        """Let only this thread compute with the model in the block."""
        at_work = self._story.at_work
        if in_backward() or at_work.computing_thread == get_ident():
            yield
            return
        with at_work:
            at_work.refuse_others()
            at_work.continuing_thread = None  # its step has ended with an exception
            at_work.computing_thread = get_ident()
        try:
            yield
        finally:
            at_work.computing_thread = None

    # --------------------------------------------------------------------------------------------------------- a call

    def call(self, member: Member, forward: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Run the call of a member's module with its weights on the device (see gates.py)."""
        self._check_call(member)
        is_outermost = self._story.at_work.computing_thread != get_ident() and not in_backward()
        if is_outermost or self._story.graphs.scopes == 0 or optimizer_steps.depth > 0:
            if active_ddp() and torch.is_grad_enabled():
                raise RuntimeError(DDP_AVERAGES_NOTHING)
            with self.alone(), self._step_of_call():
                # the module may be a member of another unit by now
                return member.module(*args, **kwargs)
        if member.compiled is not None and member.module._compiled_call_impl is None:
            forward = member.compiled
        compute = partial(forward, *args, **kwargs)
        if member.unit is None:
            return self._call_around_units(member, compute)
        autocast = autocast_dtype(self._device.type)
        if autocast is not member.autocast:
            self._story.placement.adapt_to_autocast(member, autocast)
        activations = self._story.activations
        if activations.are_kept or not activations.manages(member):
            return self._run(member, compute, autocast)
        # This is the outermost call of a unit. Its saved tensors have a policy of their own.
        self._story.finish_steps(member)
        try:
            activations.begin(member, args, kwargs)
            output = self._run(member, compute, autocast)
            activations.conclude(output)
            return output
        finally:
            activations.end()

    def _check_call(self, member: Member) -> None:
        """Raise if the call is captured as a graph, or transformed: weights cannot stream there."""
        if is_capturing():
            raise RuntimeError(
                "A module that superpipeline streams cannot be captured as a graph (by "
                "`torch.jit.trace`, `torch.export`, `torch.onnx.export`, `torch.fx`), because "
                "the graph would keep the weights of one moment. Capture a plain copy, "
                "`copy.deepcopy(module).cpu()`, or capture before or after the run."
            )
        if in_transform() and (member.is_streamed or self._story.graphs.scopes == 0):
            raise RuntimeError(
                f"{member.name or 'the model'!r}, whose weights are streamed, is called within a "
                "transform of `torch.func`. Name the modules that it calls in `resident=`, and "
                "call it within a step. To differentiate, use `torch.autograd.grad`."
            )

    def _call_around_units(self, member: Member, compute: Callable[[], Any]) -> Any:
        """Run the call of a module without a unit of its own, in which leaves stand for masters.

        `nn.TransformerEncoder` decides on a fast path by its first layer's weights: it must see ordinary ones.
        """
        with self._story.at_work:
            member.put_in_twins(self._story.backward.follow_requires_grad)
        try:
            return compute()
        finally:
            member.put_back_masters()

    def _run(self, member: Member, compute: Callable[[], Any], autocast: torch.dtype | None) -> Any:
        """Enter the member's unit, compute, and leave it again."""
        # A forward that builds no graph casts weights for each use: the cache would keep those of all units.
        uncached = autocast is not None and not torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
        call = self._story.enter_call(member)
        stack = running_calls.stack
        stack.append(call)
        try:
            if uncached:
                torch.set_autocast_cache_enabled(False)
            with self._story.activations.saved.pushed():
                # The output has no variable here: that would still hold a view of a weight when the call is left.
                return self._story.watch_output(call, compute())
        finally:
            stack.pop()
            if uncached:
                torch.set_autocast_cache_enabled(True)
            self._story.leave_call(member)
