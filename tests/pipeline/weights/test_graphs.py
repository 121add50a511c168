"""Graphs that wait for their backward."""

from __future__ import annotations

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


def test_nodes_hold_what_a_graph_announces_until_it_is_let_go() -> None:
    """And nothing of the engine after that."""
    graphs, seen = Graphs(), []
    graph = graphs.watch_current()
    first, second = (graph.announce(lambda graph, name=name: seen.append((name, graph))) for name in "ab")
    second()
    first()
    assert seen == [("b", graph), ("a", graph)]
    graphs.let_go()
    first()
    assert len(seen) == 2


def test_announcements_do_not_keep_their_graph_alive() -> None:
    """Else it would wait for a backward until Python collects garbage."""
    graphs = Graphs()
    graphs.watch_current().announce(lambda graph: None)
    graphs.begin()
    assert not graphs.waiting()
