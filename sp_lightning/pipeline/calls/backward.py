"""Backward passes: how the engine notices one, follows it through the units, and ends it.

Autograd does not tell a module that backward has reached it, but there are signs: a node that made a unit's output is
about to run, a saved weight is unpacked, a checkpoint recomputes a unit, a gradient arrives. The first sign opens the
pass; the callback that autograd runs after the last node closes it. A pass that fails is abandoned (`Story.fail`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.calls.nodes import GRADIENT
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.graphs import Graph
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.torch_private import (
    graph_task,
    in_backward,
    when_backward_ends,
    without_torch_function,
)
from sp_lightning.pipeline.units.presence import Residency
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight
from sp_lightning.pipeline.window.order import Pass
from sp_lightning.pipeline.window.window import Window


class BackwardEvents(Protocol):
    """The events of backward passes; story.py tells what happens at each."""

    def guard_masters(self) -> None:
        """Follow the first sign of a backward pass."""

    def end_backward(self, some_came: bool) -> None:
        """Follow the end of a backward pass, which may have brought gradients."""

    def abandon_backward(self, is_running: bool) -> None:
        """Follow an exception that has ended a backward pass, or the work after it."""


class BackwardPass:
    """Follows backward passes, one after the other."""

    def __init__(
        self,
        events: BackwardEvents,
        at_work: EngineAtWork,
        window: Window,
        stream: GradientStream,
    ) -> None:
        self.running = False  # whether a pass is open
        self._task = -1  # autograd's number of the pass (its graph task)
        self._window = window
        self._stream = stream
        # The hooks that refuse gradients of masters themselves, with their nodes, which must be kept alive.
        self._refusing: dict[Weight, tuple[Node, RemovableHandle]] = {}
        self._events = events
        self._at_work = at_work
        # The units that backward computes with now, for a call and for calls around it.
        self.in_use: list[Unit] = []
        self._reached: list[Unit] = []  # the units that backward has reached
        self._graphs: set[Graph] = set()

    def note_sign(self) -> None:
        """Note a sign of a backward pass; the first one opens the pass."""
        if self.running:
            self._at_work.refuse_others()
            return
        if not in_backward():
            return
        assert not torch.autograd.is_multithreading_enabled(), "this pass was begun past torch's functions for Python"
        with self._at_work:
            self._at_work.refuse_others()
            self._at_work.continuing_thread = get_ident()
            self._task = graph_task()
            self._events.guard_masters()
            when_backward_ends(self._end)
            self.running = True

    # ---------------------------------------------------------------------------------------------- gradients

    def follow_requires_grad(self, twin: Twin) -> None:
        """Let a twin require a gradient if its master does, and collect its gradients."""
        with torch.inference_mode(False):
            twin.parameter.requires_grad_(twin.weight.master.requires_grad)
            if not twin.parameter.requires_grad:
                return
            weight = twin.weight
            if twin.gradient_hook is None:
                # A leaf's own method would register the hook on the master.
                register: Any = Tensor.register_post_accumulate_grad_hook
                twin.gradient_hook = register(twin.parameter, partial(self._collect, weight))
            if weight not in self._refusing:  # a graph may have been built on the master itself
                with without_torch_function():
                    node = get_gradient_edge(weight.master).node
                # This is no pre-hook: torch 2.9 forgets those on a node if a user's function has saved the weight.
                self._refusing[weight] = node, node.register_hook(partial(_refuse, weight))

    def _collect(self, weight: Weight, leaf: Tensor) -> None:
        with without_torch_function():
            if not self.running:
                self.note_sign()
            if self._window.backend.stream_of_step is not None:
                self._window.backend.check_stream(f"The gradient of weight {weight.name!r}")
            gradient: Tensor | None = GRADIENT.__get__(leaf)
            GRADIENT.__set__(leaf, None)
            if gradient is None or not weight.master.requires_grad:  # frozen since the forward
                return
            # A backward inside the one that opened the pass (a reentrant checkpoint's, say) may not be the last.
            self._stream.collect(weight, gradient, is_last=graph_task() == self._task)

    def allow_gradients_of_masters(self) -> None:
        """Let masters have gradients of their own again."""
        for _, handle in self._refusing.values():
            handle.remove()
        self._refusing.clear()

    # -------------------------------------------------------------------------------------------------- units

    def mark_reached(self, unit: Unit, graph: Graph) -> None:
        """Note that backward has reached a unit by a graph."""
        self._graphs.add(graph)
        if not unit.is_reached:
            unit.is_reached = True
            self._reached.append(unit)

    def bring_for_backward(self, twin: Twin) -> None:
        """Bring a weight that backward unpacks to the device."""
        unit = twin.unit
        if self._window.backend.poison:
            self._at_work.refuse_others()  # the axiom of [Note: one thread, one stream]
        is_expected = not unit.conflicts or unit in self.in_use
        if self.running and is_expected and unit.presence.is_valid:
            return
        with self._at_work:
            self.note_sign()
            if unit.presence.residency is Residency.ABSENT:
                self._window.stats.heals += 1
            is_unannounced = self.running and not is_expected
            if is_unannounced:  # no unit announces the nodes of a gradient's gradient
                self._window.order.record_use(twin.weight.unit.members[0].index, Pass.BACKWARD)
            self._window.bring(unit)
            if is_unannounced:
                self.in_use = [unit]
                self._window.prefetch(self.in_use)

    @torch.no_grad()
    def abandon(self) -> None:
        """Reset after an exception that ended the pass before autograd could call back."""
        self._leave_units()  # graphs are not done: code that still holds one may run backward again
        self._events.abandon_backward(self.running)
        self._stream.abandon()
        self.running = False
        self._at_work.continuing_thread = None

    def _end(self) -> None:
        with self._at_work:
            for graph in self._graphs:
                graph.done = True
            self._leave_units()
            some_came = self._stream.end_backward()
            self.running = False
            self._at_work.continuing_thread = None
            self._events.end_backward(some_came)

    def _leave_units(self) -> None:
        for unit in self._reached:
            unit.leave(is_over=True)
        self._reached.clear()
        self._graphs.clear()
        self.in_use = []


def _refuse(weight: Weight, _: object, gradients: Sequence[Tensor | None]) -> None:
    """Raise if autograd has brought a gradient to a master itself, on the host.

    Between steps, masters are ordinary Parameters, so a graph may be built on them: a penalty on weights that is
    computed before the step that adds it to its loss.
    """
    if gradients[0] is not None and weight.master.requires_grad:
        raise RuntimeError(
            f"Weight {weight.name!r} got a gradient from a graph that was built outside of a step. "
            "Compute with weights in `with pipeline.step():` (Fabric's is `fabric.strategy.step()`), as "
            "`training_step` does."
        )
