"""Autograd graphs that may still need weights where these lay when the graphs were built."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

_STALE_AFTER = 100  # steps; nobody accumulates losses for longer before one backward


class Graph:
    """Stands for the graph of one step, and lives for as long as autograd holds nodes of it.

    Attributes:
        number: The number of the step.
        has_calls: Whether units were called in it, so that their nodes tell when backward runs through it.
        done: Whether a backward has run through it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_calls = False
        self.done = False


class Announcement:
    """All that nodes hold of the engine: a call that can be cut off.

    A module may hold a graph that was built on it (`self.last = loss`). Python's collector does not see what nodes
    hold, so the module would never be freed if that led to it.
    """

    def __init__(self, action: Callable[..., None]) -> None:
        self._action: Callable[..., None] | None = action

    def __call__(self, *args: Any) -> None:
        """Act, unless it was cut off."""
        if self._action is not None:
            self._action(*args)

    def cut(self) -> None:
        """Forget the action."""
        self._action = None


class Graphs:
    """The graphs that may still need weights where these lay when the graphs were built.

    Attributes:
        current: The graph that is being built.
        calls: How many calls of units have begun.
        scopes: How many scopes of the step under way are open, one inside of the other.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._announcements: weakref.WeakSet[Announcement] = weakref.WeakSet()
        self.current = Graph(0)
        self.calls = 0
        self.scopes = 0
        self._has_warned = False

    @property
    def in_step(self) -> bool:
        """Whether the scope of a step is open."""
        return self.scopes > 0

    def begin(self) -> None:
        """Begin the graph of a new step."""
        self.current = Graph(self.current.number + 1)

    def number_call(self) -> int:
        """Count a call that begins, and return its number."""
        self.calls += 1
        return self.calls

    def watch_current(self) -> Graph:
        """Return the current graph, which from now on counts as waiting for a backward, unless it has had one."""
        self._alive.add(self.current)
        return self.current

    def announce(self, action: Callable[..., None]) -> Announcement:
        """Return a call for nodes to hold, which lives for as long as they do."""
        announcement = Announcement(action)
        self._announcements.add(announcement)
        return announcement

    def let_go(self) -> None:
        """Refer to the module no longer: it is given back, and no backward may run through these graphs."""
        for announcement in self._announcements:
            announcement.cut()

    def waiting(self) -> bool:
        """Tell whether a graph still waits for its backward."""
        waiting = [graph.number for graph in self._alive if not graph.done]
        if waiting and self.current.number - min(waiting) > _STALE_AFTER and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The output of a step has been kept for {_STALE_AFTER} steps with its graph, and no backward has run "
                "through it. While the graph lives, the window cannot change, and steps are not counted. "
                "Keep `loss.detach()` instead.",
                stacklevel=2,
            )
        return bool(waiting)
