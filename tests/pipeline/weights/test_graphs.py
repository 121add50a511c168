"""Graphs that wait for their backward."""

from __future__ import annotations

from sp_lightning.pipeline.weights.graphs import Graphs


def test_a_graph_that_has_had_a_backward_does_not_wait_again() -> None:
    """What is computed after that may be kept for ever, such as a preview of a generator's images."""
    graphs = Graphs()
    graph = graphs.current
    graph.done = True
    graphs.begin()
    assert not graphs.waiting()


def test_a_dropped_graph_does_not_wait() -> None:
    """As that of an output that was thrown away."""
    graphs = Graphs()
    graphs.begin()
    assert not graphs.waiting()
