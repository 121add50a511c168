"""Calls of units, and the nodes of their graphs: those that announce a backward, and those that stand for weights.

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
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from sp_lightning.pipeline.activations.offload import Bundle
from sp_lightning.pipeline.graphs import Graph
from sp_lightning.pipeline.operations import replace_instances, run_hooks
from sp_lightning.pipeline.tensors_in import tensors_in
from sp_lightning.pipeline.torch_private import alias_count, storage_key, tensor_hooks, without_torch_function
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.weight import Twin, Weight

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

    def __init__(self, member: Member, number: int, is_backward: bool, places: dict[int, Twin]) -> None:
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
                    "class of its own, a function, an array), where a clone cannot take its place. "
                    "Return a clone of the weight, or name it in `resident`."
                )
        # Something else than the twin and its data has a view of a weight: a graph, or a hidden object.
        if hidden and any(alias_count(entry.weight.twin.data) > 2 for entry in self.member.entries):
            raise RuntimeError(
                f"superpipeline: {self.member.name!r} returns an object of the class "
                f"{type(hidden[0]).__qualname__!r}, which cannot be searched for weights. Return "
                "what it holds as tensors, or name the weights in `resident`."
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
