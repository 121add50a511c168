"""Hooks that run before backward reaches what a call of a module has computed, and users' hooks on weights.

[Note: before backward]
Hooks on output tensors are lost when a view is modified in place (`y += x`, pytorch#181832). The node that made the
tensor (its base, for a view) stays in the graph in every case, so the hook is registered there. A view that a custom
autograd function returns has a base from before its graph, or from inside of it, but cannot be modified in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from sp_lightning.pipeline.weights.graphs import Graph


_WATCHED_AT = "superpipeline"  # keys in a node's metadata
_NEEDED_BY = "superpipeline leaf"


def before_backward(outputs: list[Tensor], action: Callable[[], None], since: int, now: int) -> None:
    """Run an action before backward reaches the nodes with which a call made its outputs.

    A call that passes an input through has not computed it. The node of such an output belongs to an earlier call,
    whose weights would have to make room for this call's at the very moment at which they are needed.

    Args:
        outputs: The tensors that the call returned.
        action: Called before backward reaches each of their nodes.
        since: The number of calls when this one began.
        now: The number of calls now.
    """
    nodes = set(map(_node_that_stays, outputs)) - {None}

    def run(_: Any) -> None:
        action()

    for node in nodes:
        if node.metadata.setdefault(_WATCHED_AT, now) >= since:
            node.register_prehook(run)


def _node_that_stays(output: Tensor) -> Any:
    """Return the node that made a tensor or its base; None if it has none."""
    base = output._base
    if base is None or base.grad_fn is None or isinstance(output.grad_fn, BackwardCFunction):
        return output.grad_fn
    return base.grad_fn


def hold_while_needed(leaf: nn.Parameter, graph: Graph, reached: Callable[[Graph], None]) -> None:
    """Keep `graph` alive for as long as an autograd graph waits to give this leaf its gradient, and no longer.

    A leaf does not hold the node that accumulates its gradient; graphs that were built on it do.

    Args:
        leaf: A leaf that requires a gradient.
        graph: The graph to keep alive.
        reached: Called with each graph that is held here, when backward reaches the leaf.
    """
    node = get_gradient_edge(leaf).node
    metadata: Any = node.metadata
    if _NEEDED_BY not in metadata:
        held: list[Graph] = []
        metadata[_NEEDED_BY] = held

        def run(_: Any) -> None:
            for each in held:
                reached(each)

        node.register_prehook(run)
    graphs = metadata[_NEEDED_BY]
    if graph not in graphs:  # a loss that is kept keeps the node alive over several steps, and so for several graphs
        graphs[:] = [*(other for other in graphs if not other.done), graph]


def run_hooks(hooks: Iterable[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    """Run hooks of `Tensor.register_hook`, and return what they make of a gradient, where it was."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.to(gradient.device)
    return gradient
