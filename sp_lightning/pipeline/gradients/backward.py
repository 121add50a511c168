"""A backward pass: how the engine notices it, follows it through the units, and ends it.

Nothing tells a module that backward has come to it. The signs are: a node that made a unit's output is about to run,
a saved weight is unpacked, a checkpoint recomputes a unit, a gradient arrives. The first sign opens the pass; the
callback that autograd runs after the last node closes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sp_lightning.pipeline._private import graph_task, in_backward, when_backward_ends
from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.modules.at_work import EngineAtWork
from sp_lightning.pipeline.modules.swap import swap_in, swap_out
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.graphs import Graph
from sp_lightning.pipeline.weights.schedule import Pass, Schedule
from sp_lightning.pipeline.weights.units import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin
from sp_lightning.pipeline.weights.window import Window


class BackwardPass:
    """Follows backward passes, one after the other.

    Args:
        window: Brings groups to the device.
        schedule: Is told what is used.
        returns: Gets the gradients home.
        resident: The unit of resident weights.
        stats: Counters.
        at_work: Entered around what the pass does.
        on_begin: Called when a pass opens.
        on_end: Called when it has ended.

    Attributes:
        running: Whether a pass is open.
        task: Autograd's number of the pass.
        in_use: Groups of the unit that backward reached last, and of those around it.
        closed: Whether another arrangement has taken over: what the graphs of this one announce is of no use.
    """

    def __init__(
        self,
        *,
        window: Window,
        schedule: Schedule,
        returns: GradientReturn,
        resident: Unit,
        stats: Stats,
        at_work: EngineAtWork,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.running = False
        self.closed = False
        self.task = -1
        self._window = window
        self._schedule = schedule
        self._returns = returns
        self._resident = resident
        self._stats = stats
        self._at_work = at_work
        self._on_begin = on_begin
        self._on_end = on_end
        self.in_use: list[Group] = []
        self._reached: list[Unit] = []
        self._graphs: set[Graph] = set()
        self._callback: Callable[[], object] = lambda: None

    def note(self) -> None:
        """Called at every sign of a backward pass; the first one opens it."""
        self.forget_failed()
        if not self.running and in_backward():
            self.running = True
            self.task = graph_task()
            self._on_begin()
            callback = partial(self._end)
            self._callback = weakref.ref(callback)  # autograd holds it for as long as the pass lives
            when_backward_ends(callback)

    def forget_failed(self) -> None:
        """If the pass has ended with an exception that the user has caught, nothing is expected of it any more."""
        if self.running and self._callback() is None:
            self.abandon()

    def reach(self, member: Member, graph: Graph, groups: Sequence[Group], around: Sequence[Group]) -> None:
        """Backward is about to run the nodes of a member's call.

        Args:
            member: Whose call it was.
            graph: The graph that the call built.
            groups: What the call computed with.
            around: Groups of calls that were around it, whose backward is not over either.
        """
        unit = member.unit
        if unit is None:
            return
        with self._at_work:
            self.note()
            self._graphs.add(graph)
            self._schedule.visit(member.index, Pass.BACKWARD)
            self._returns.ship_all_but([unit, self._resident])
            for group in groups:
                self._window.bring(group)
            self._returns.fetch_sums(unit)
            if unit not in self._reached:
                self._reached.append(unit)
            for other in unit.members:  # for checkpoints inside of the unit, which call its parts and not the unit
                swap_in(other, self._returns.follow_requires_grad)
            self.in_use = [*groups, *around]
            self._window.prefetch(self.in_use)

    def go_through(self, graph: Graph) -> None:
        """Backward runs a node of a graph that no unit was called for."""
        with self._at_work:
            self.note()
            self._graphs.add(graph)

    def is_uncompiled(self, member: Member) -> bool:
        """Whether backward runs through a graph in which the member's calls were not compiled."""
        return any(member in graph.uncompiled for graph in self._graphs)

    def require(self, twin: Twin) -> None:
        """Backward unpacks a weight."""
        group = twin.group
        is_expected = group.kept or group in self.in_use
        if self.running and is_expected and group.readable and not group.suspect:
            return
        with self._at_work:
            self.note()
            self._stats.heals += not group.loaded
            follows = self.running and not is_expected
            if follows:  # nodes that no unit announces: the gradient of a gradient
                self._schedule.visit(twin.weight.unit.members[0].index, Pass.BACKWARD)
            self._window.bring(group)
            if follows:
                self.in_use = [group]
                self._window.prefetch(self.in_use)

    def is_nested(self) -> bool:
        """Whether autograd is in a backward inside of the one that was noticed first, as reentrant checkpoints are."""
        return graph_task() != self.task

    def has_reached(self, unit: Unit | None) -> bool:
        """Whether backward is in a unit, so that its modules hold twins."""
        return unit in self._reached

    def evict(self, group: Group) -> None:
        """A group's place is given away: its modules hold masters again."""
        for unit in [unit for unit in self._reached if unit.group is group]:
            self._reached.remove(unit)
            _take_twins_from(unit)

    @torch.no_grad()
    def abandon(self) -> None:
        """An exception has ended the pass, and autograd has not called back."""
        self._leave_units()
        self._graphs.clear()  # who still holds one may try again
        self._returns.abandon()
        self.running = False

    def _end(self) -> None:
        with self._at_work:
            self._leave_units()
            for graph in self._graphs:
                graph.done = True
            self._graphs.clear()
            self._returns.finish()
            self.running = False
            self._on_end()

    def _leave_units(self) -> None:
        for unit in self._reached:
            _take_twins_from(unit)
        self._reached.clear()
        self.in_use = []


def _take_twins_from(unit: Unit) -> None:
    for member in unit.members:
        if not member.running:
            swap_out(member)
