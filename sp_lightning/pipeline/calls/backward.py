"""Backward passes: how the engine notices one, follows it through the units, and ends it.

Autograd does not tell a module that backward has reached it, but there are signs: a node that made a unit's output is
about to run, a saved weight is unpacked, a checkpoint recomputes a unit, a gradient arrives. The first sign opens the
pass; the callback that autograd runs after the last node closes it. A pass that fails is abandoned (`Story.fail`).

[Note: what a custom Function keeps]
`ctx.weight = weight` passes the hooks for saved tensors by, so nothing brings the weight back when backward reads it.
But the Function's own node reads it. So each call of a unit collects the nodes of the Functions that are applied in it.
Backward announces itself there, wherever the Function's output goes. If a Function was applied in a unit's call, the
optimizer updates the unit only after backward has left it: the Function may hold any weight, in a list or a module.

[Note: what nodes hold]
A module may hold a graph that was built on it (`self.last = loss`). Python's collector does not see what nodes hold. A
reference from a node to the module would therefore keep it alive, so nodes refer to the engine's objects weakly.

[Note: before backward]
Hooks on output tensors are lost when a view is modified in place (`y += x`, pytorch#181832). The node that made the
tensor (its base, for a view) stays in the graph in every case, so the hook is registered there. A view that a custom
autograd function returns has a base from before its graph, or from inside of it, but cannot be modified in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import chain, islice
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.activations.offload import Bundle
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.graphs import Graph
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.operations import replace_instances, run_hooks, tensors_in
from sp_lightning.pipeline.torch_private import (
    alias_count,
    graph_task,
    in_backward,
    storage_key,
    tensor_hooks,
    when_backward_ends,
    without_torch_function,
)
from sp_lightning.pipeline.units.unit import Member, Residency, Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight
from sp_lightning.pipeline.window.window import Pass, Window

GRADIENT: Any = Tensor.grad  # the leaf's own gradient; its class would answer with the master's


def nodes_of(outputs: list[Tensor]) -> list[Node]:
    """Return the nodes that made tensors, as they stay in the graph ([Note: before backward])."""
    nodes: list[Node] = []
    for output in outputs:
        node, base = output.grad_fn, output._base
        if base is not None and base.grad_fn is not None and not isinstance(node, BackwardCFunction):
            node = base.grad_fn
        if node is not None:
            nodes.append(node)
    return nodes


def before_backward(nodes: Iterable[Node], action: Callable[[Any], None], since: int, now: int) -> None:
    """Run an action before backward reaches the nodes with which a call made its outputs.

    A call that passes an input through has not computed it. The node of such an output belongs to an earlier call,
    whose weights would have to make room for this call's at the very moment at which they are needed. So `since` is the
    number of calls when this one began, and `now` is the number of calls so far.
    """
    for node in set(nodes):
        metadata: Any = node.metadata  # a dictionary, not a method as typed
        if metadata.setdefault("superpipeline", now) >= since:
            node.register_prehook(action)


def edges_of(weight: Weight) -> list[Any]:
    """Return a weight's edges in graphs. Its leaves will not do: they may have a class of their own."""
    with without_torch_function():
        leaves = [twin.parameter for twin in (weight.twin, *weight.twins_in_graphs) if twin.parameter.requires_grad]
        if weight.master.requires_grad and leaves:
            return list(map(get_gradient_edge, leaves))
        # No graph has the weight.
        return [weight.twin.data.detach().requires_grad_(weight.master.requires_grad)]


def differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` with leaves in place of weights; their gradients get the masters' dtype.

    The guard stays in force meanwhile: backward runs checkpoints and hooks, which may use weights.
    """
    if isinstance(inputs, dict):
        by_position = differentiate(outputs, list(inputs.values()), *args, **kwargs)
        return dict(zip(inputs, by_position, strict=True))
    inputs = [inputs] if isinstance(inputs, Tensor | Weight) else list(inputs)
    edges = [edges_of(value) if isinstance(value, Weight) else [value] for value in inputs]
    # The outputs may have used one leaf of a weight alone.
    if any(len(input_edges) > 1 for input_edges in edges):
        kwargs["allow_unused"] = True
    edge_gradients = iter(torch.autograd.grad(outputs, list(chain.from_iterable(edges)), *args, **kwargs))
    gradients: list[Tensor | None] = []
    for value, input_edges in zip(inputs, edges, strict=True):
        parts = [part for part in islice(edge_gradients, len(input_edges)) if part is not None]
        if isinstance(value, Weight) and parts:
            with without_torch_function():
                gradient = reduce(torch.add, [part.to(value.dtype) for part in parts])
                parts = [run_hooks(tensor_hooks(value.master), gradient)]
        gradients.append(parts[0] if parts else None)
    return tuple(gradients)


class RunningCall:
    """A call of a member that is under way.

    Attributes:
        member: The member.
        needed: The units whose weights it computes with.
        number: The number of the call among all calls.
        is_backward: Whether it is in a backward pass, which runs a forward again.
        nodes: The nodes of custom Functions that were applied in it.
    """

    def __init__(
        self,
        member: Member,
        number: int,
        is_backward: bool,
        places: dict[int, Twin],
    ) -> None:
        self.member = member
        self.needed = member.needed
        self.number = number
        self.is_backward = is_backward
        self.nodes: list[Node] = []
        self._twins_by_memory = places

    def note_function(self, output: Any) -> None:
        """Note that a custom Function was applied: it may read any weight of the call in backward."""
        outputs = output if isinstance(output, tuple | list) else [output]
        nodes = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn is not None]
        if nodes:
            self.nodes.append(nodes[0])
            for unit in self.needed:
                unit.readers.has_raw_readers = True

    def outside_of_places(self, output: Any) -> tuple[Any, list[Tensor]]:
        """Return the call's output, with clones of tensors that lie in the place of a weight, and all tensors in it.

        Raises:
            RuntimeError: A clone cannot replace a weight there, or an object that cannot be searched may hold one.
        """
        places = self._twins_by_memory.keys()

        def out_of_place(tensor: Tensor) -> Tensor:
            is_outside = places.isdisjoint(map(storage_key, tensors_in(tensor)))
            return tensor if is_outside else tensor.clone()

        hidden: list[Any] = []
        tensors = tensors_in(output, hidden)
        if not places.isdisjoint(map(storage_key, tensors)):
            output = replace_instances(output, Tensor, out_of_place)
            tensors = tensors_in(output)
            if not places.isdisjoint(map(storage_key, tensors)):
                raise RuntimeError(
                    f"superpipeline: {self.member.name!r} returns one of its weights in an object (of a "
                    "custom class, a function, an array). There, a clone cannot take its place. Return a "
                    "clone of the weight, or name it in `resident`."
                )
        # Something else than the twin and its data has a view of a weight: a graph, or a hidden object.
        if hidden and any(alias_count(entry.weight.twin.data) > 2 for entry in self.member.entries):
            raise RuntimeError(
                f"superpipeline: {self.member.name!r} returns an object of the class "
                f"{type(hidden[0]).__qualname__!r}, which cannot be searched for weights. Return "
                "its tensors themselves, or name the weights in `resident`."
            )
        return output, tensors


class CallToCome:
    """A call that backward has not reached yet; its nodes hold this object ([Note: what nodes hold]).

    Attributes:
        member: A weak reference to the member.
        graph: The graph that the call has built.
        needed: The units whose weights the call has used.
        bundle: The activations that it has offloaded; None if none have to return.
    """

    def __init__(self, call: RunningCall, graph: Graph, bundle: Bundle | None) -> None:
        self.member = weakref.ref(call.member)
        self.graph = graph
        self.needed = call.needed
        self.bundle = bundle
        self._unit = call.member.unit
        if self._unit is not None:
            self._unit.readers.calls_to_come += 1

    def end(self) -> None:
        """Note that backward has reached the call; each of its nodes may tell that."""
        unit = self._unit
        self._unit = None
        if unit is not None:
            unit.readers.calls_to_come -= 1

    __del__ = end


class BackwardEvents(Protocol):
    """The events of backward passes; story.py tells what happens at each."""

    def guard_masters(self) -> None:
        """Follow the first sign of a backward pass."""

    def end_backward(self, some_came: bool) -> None:
        """Follow the end of a backward pass, which may have brought gradients."""

    def abandon_backward(self) -> None:
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
        assert not torch.autograd.is_multithreading_enabled(), (
            "a backward pass was begun past torch's functions for Python, and may use several threads"
        )
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
        self._events.abandon_backward()
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
            f"Weight {weight.name!r} got a gradient from a graph that was built outside of a step. Compute "
            "with weights in `with pipeline.step():` (in Fabric, `fabric.strategy.step()`), or in "
            "`training_step`."
        )
