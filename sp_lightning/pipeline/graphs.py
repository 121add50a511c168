"""The graphs that wait for their backward, each for as long as autograd holds nodes of it."""

from __future__ import annotations

import enum
import weakref
from operator import attrgetter


class Opener(enum.Enum):
    """The scope that opens a step."""

    CALL = enum.auto()
    """A call of a module."""
    PROGRAM = enum.auto()
    """A scope of the program's own, before which it may have given the module other parameters."""
    LAST_STEP = enum.auto()
    """A scope for another backward pass of the last step."""


class Graph:
    """Stands for the graph of one step, and exists for as long as autograd holds nodes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_built = False  # whether a call has made nodes of it
        self.done = False  # whether a backward has run through it
        self.outdated = False  # whether weights have got other places since


class Graphs:
    """The graphs that may still need weights in the places that these had when the graphs were built."""

    def __init__(self) -> None:
        self._earlier: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.current = Graph(0)  # the graph that is being built
        self.calls = 0  # how many calls of units have begun
        # Whether weights were used outside of units since the last scope or backward.
        self.has_served = False
        self.scopes = 0  # the number of nested scopes of the step under way

    def begin_graph(self) -> None:
        """Begin the graph of a new step; code that holds nodes of the last graph may still run backward through it."""
        self._earlier.add(self.current)
        self.current = Graph(self.current.number + 1)

    def outdate_all(self) -> None:
        """Note that weights have left the places in which graphs need them."""
        self.begin_graph()
        for graph in self._earlier:
            graph.outdated = True

    def earlier_waiting(self) -> bool:
        """Tell whether a graph of an earlier step still waits for its backward."""
        return not all(map(attrgetter("done"), self._earlier))

    def waiting(self) -> bool:
        """Tell whether a graph may still wait for its backward, which may come in the next scope."""
        return self.has_served or self.earlier_waiting()
