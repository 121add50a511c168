"""Graphs that wait for their backward."""

from __future__ import annotations

import weakref

from sp_lightning.pipeline.weights.graphs import Graphs


def test_a_graph_waits_from_its_first_use_to_its_backward() -> None:
    graphs = Graphs()
    assert not graphs.waiting()
    graph = graphs.watch_current()
    assert graphs.waiting()
    graph.done = True
    assert not graphs.waiting()


def test_a_graph_that_has_had_a_backward_does_not_wait_again() -> None:
    """What is computed after that may be kept for ever, such as a preview of a generator's images."""
    graphs = Graphs()
    graph = graphs.watch_current()
    graph.done = True
    assert graphs.watch_current() is graph
    assert not graphs.waiting()


def test_a_dropped_graph_does_not_wait() -> None:
    """As that of an output that was thrown away."""
    graphs = Graphs()
    graphs.watch_current()
    graphs.begin()
    assert not graphs.waiting()


def test_announcements_are_made_until_they_are_let_go() -> None:
    """Nodes hold nothing of the engine after that."""
    graphs, seen = Graphs(), []
    first, second = (graphs.announce(lambda *args, name=name: seen.append((name, *args))) for name in "ab")
    second(2)
    first()
    assert seen == [("b", 2), ("a",)]
    graphs.let_go()
    first()
    assert len(seen) == 2


def test_an_announcement_dies_with_the_nodes_that_hold_it() -> None:
    """One step may contain any number of forwards and backwards."""

    def action() -> None:
        """Nothing."""

    graphs, gone = Graphs(), weakref.ref(action)
    graphs.watch_current()
    announcement = graphs.announce(action)
    del action
    assert gone() is not None
    del announcement
    assert gone() is None


def test_announcements_do_not_keep_their_graph_alive() -> None:
    """Else it would wait for a backward until Python collects garbage."""
    graphs = Graphs()
    graph = graphs.watch_current()
    announcement = graphs.announce(lambda graph=graph: None)
    graphs.begin()
    del graph
    assert graphs.waiting()
    del announcement
    assert not graphs.waiting()
