"""Graphs of autograd that may still need weights where they were when the graphs were built."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sp_lightning.pipeline.weights.units import Member


class Graph:
    """Lives as long as autograd holds the nodes of one step.

    Attributes:
        done: Whether a backward has run through it.
        uncompiled: Members whose calls in it are not compiled, which goes for a checkpoint's recomputation, too.
    """

    def __init__(self) -> None:
        self.done = False
        self.uncompiled: set[Member] = set()


class Graphs:
    """The graphs that may still need the weights where they were when the graphs were built.

    Attributes:
        current: The one that is being built.
        calls: How many calls of units have begun.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.current = Graph()
        self.calls = 0

    def begin(self) -> None:
        """A new step builds a new graph."""
        self.current = Graph()

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
        return any(not graph.done for graph in self._alive)
