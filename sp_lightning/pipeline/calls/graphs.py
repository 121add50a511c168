"""Autograd graphs: those that may still need weights where these lay, and hooks that run before backward reaches them.

[Note: what nodes hold]
A module may hold a graph that was built on it (`self.last = loss`). Python's collector does not see what nodes hold, so
the module would never be freed if that led to it: nodes refer to the engine's objects weakly.

[Note: before backward]
Hooks on output tensors are lost when a view is modified in place (`y += x`, pytorch#181832). The node that made the
tensor (its base, for a view) stays in the graph in every case, so the hook is registered there. A view that a custom
autograd function returns has a base from before its graph, or from inside of it, but cannot be modified in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_WATCHED_AT = "superpipeline"  # a key in a node's metadata


class Graph:
    """Stands for the graph of one step, and lives for as long as autograd holds nodes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False  # whether a backward has run through it
        self.outdated = False  # whether units have been arranged anew since


class Graphs:
    """The graphs that may still need weights where these lay when the graphs were built."""

    def __init__(self) -> None:
        self._earlier: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.current = Graph(0)  # the graph that is being built
        self.calls = 0  # how many calls of units have begun
        self.has_served = False  # whether weights were used outside of units since the last scope or backward
        self.scopes = 0  # how many scopes of the step under way are open, one inside of the other

    def begin(self) -> None:
        """Begin the graph of a new step; whoever holds nodes of the last one may run a backward through it."""
        self._earlier.add(self.current)
        self.current = Graph(self.current.number + 1)

    def outdate(self) -> None:
        """Note that weights no longer lie where graphs need them."""
        self.begin()
        for graph in self._earlier:
            graph.outdated = True

    def is_waiting(self, number: int | None) -> bool:
        """Tell whether an earlier graph still waits for its backward."""
        return any(graph.number == number and not graph.done for graph in self._earlier)

    def waiting(self) -> bool:
        """Tell whether a graph still waits for its backward; where no unit tells, that may be in the next scope."""
        has_served, self.has_served = self.has_served, False
        return has_served or any(not graph.done for graph in self._earlier)


class CastCache:
    """Autocast's cache, which has one cast of each weight until the outermost scope of autocast ends.

    Nothing tells of that. So it is given something that lives with a cast which only the cache holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = count()
        self._filling: Callable[[], _Filling | None] = lambda: None

    def filling(self) -> int | None:
        """Return a number that is another one whenever the cache was emptied; None if autocast does without it."""
        if not torch.is_autocast_cache_enabled():
            return None
        filling = self._filling()
        if filling is None:
            weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=self._device))
            nothing = weight.detach()[:, :0]
            node: Any = torch.addmm(weight, nothing, nothing.t()).grad_fn  # it saves nothing for backward
            filling = node.next_functions[0][0].metadata[_WATCHED_AT] = _Filling(next(self._numbers))
            self._filling = weakref.ref(filling)
        return filling.number


class _Filling:
    def __init__(self, number: int) -> None:
        self.number = number


def before_backward(outputs: list[Tensor], action: Callable[[Any], None], since: int, now: int) -> None:
    """Run an action before backward reaches the nodes with which a call made its outputs.

    A call that passes an input through has not computed it. The node of such an output belongs to an earlier call,
    whose weights would have to make room for this call's at the very moment at which they are needed. So `since` is the
    number of calls when this one began, and `now` that of all.
    """
    nodes: set[Any] = set()
    for output in outputs:
        node, base = output.grad_fn, output._base
        if base is not None and base.grad_fn is not None and not isinstance(node, BackwardCFunction):
            node = base.grad_fn
        if node is not None:
            nodes.add(node)
    for node in nodes:
        if node.metadata.setdefault(_WATCHED_AT, now) >= since:
            node.register_prehook(action)
