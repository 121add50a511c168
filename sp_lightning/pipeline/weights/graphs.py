"""Graphs of autograd that may still need weights where they were when the graphs were built."""

from __future__ import annotations

import warnings
import weakref

_LONG = 100  # steps: longer than anybody accumulates losses before one backward


class Graph:
    """Lives as long as autograd holds the nodes of one step.

    Args:
        number: The number of the step.

    Attributes:
        number: See above.
        done: Whether a backward has run through it.
        uncompiled: Members whose calls in it are not compiled, which goes for a checkpoint's recomputation, too.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False
        self.uncompiled: set[object] = set()


class Graphs:
    """The graphs that may still need the weights where they were when the graphs were built.

    Attributes:
        current: The one that is being built.
        calls: How many calls of units have begun.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.current = Graph(0)
        self.calls = 0
        self._has_warned = False

    def begin(self) -> None:
        """A new step builds a new graph."""
        self.current = Graph(self.current.number + 1)

    def number_call(self) -> int:
        """A call begins, which gets the next number."""
        self.calls += 1
        return self.calls

    def watch_current(self) -> Graph:
        """The current graph, from now on among those that may be waiting."""
        self._alive.add(self.current)
        return self.current

    def waiting(self) -> bool:
        """Whether some graph has not been through a backward."""
        waiting = [graph.number for graph in self._alive if not graph.done]
        if waiting and self.current.number - min(waiting) > _LONG and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"What a step computed has been kept for {_LONG} steps with its graph, and no backward has run through "
                "it. As long as it lives, the window stays as it is, and steps are not counted. Keep `loss.detach()`.",
                stacklevel=2,
            )
        return bool(waiting)
