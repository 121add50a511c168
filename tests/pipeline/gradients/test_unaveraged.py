"""Sums of one process alone: back on the device in one copy, early, and never forgotten on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sp_lightning.pipeline.gradients.unaveraged import Unaveraged

from ..parts import GradientScene, RecordingBackend, gradient_scene, host_backend


@contextmanager
def summed(*values: float, lowered: torch.dtype | None = None) -> Iterator[tuple[GradientScene, Unaveraged, Any]]:
    """A unit whose gradients are on the host, and waits for the last micro-batch."""
    shapes = [(2, 3), (4,), (5,)][: len(values)]
    with gradient_scene(*shapes, lowered=lowered) as s:
        replicas = SimpleNamespace(accumulates=True, summed_here=set())
        sums = Unaveraged(cast("Any", replicas), s.gradient_return.gradients, s.backend, s.stats)
        sums.note(s.weights)
        s.backward(*values)
        replicas.accumulates = False
        cast("RecordingBackend", s.backend).calls.clear()
        yield s, sums, replicas


def uploads(s: GradientScene) -> int:
    return len(cast("RecordingBackend", s.backend).said("upload"))


@pytest.mark.parametrize("lowered", [None, torch.bfloat16])
def test_a_units_sums_come_back_in_one_copy(lowered: torch.dtype | None) -> None:
    """When backward reaches it, in the dtype in which they are."""
    with summed(2, 3, lowered=lowered) as (s, sums, replicas):
        sums.fetch(s.placed.unit)
        sums.fetch(s.placed.unit)
        assert uploads(s) == 1
        assert replicas.summed_here, "they are on the host still"
        taken = sums.take(s.weights)
        assert uploads(s) == 1
        assert [taken[w].unique().tolist() for w in s.weights] == [[2], [3]]
        assert {tensor.dtype for tensor in taken.values()} == {lowered or torch.float32}
        assert s.stats.bytes_to_device == 512
        assert s.gradients() == [None, None]
        assert not replicas.summed_here
        assert sums.among(s.weights) == []


def test_the_host_does_not_wait_for_gradients_that_are_still_added() -> None:
    """The copy does."""
    with host_backend(poison=True) as backend, gradient_scene((3,), (4,), backend=backend) as s:
        replicas = SimpleNamespace(accumulates=True, summed_here=set())
        sums = Unaveraged(cast("Any", replicas), s.gradient_return.gradients, backend, s.stats)
        sums.note(s.weights)
        s.backward(1, 2)
        s.gradient_return.gradients.settle()
        gate, opened = threading.Event(), []
        backend._host.submit(lambda: opened.append(gate.wait(10)))
        s.backward(10, None)
        s.backward(None, 20)
        replicas.accumulates = False
        sums.fetch(s.placed.unit)
        gate.set()
        assert [tensor.unique().tolist() for tensor in sums.take(s.weights).values()] == [[11], [22]]
        assert opened == [True], "the host waited until the gate was given up"


def test_sums_that_were_not_fetched_ahead_are_fetched_when_taken() -> None:
    with summed(2, 3) as (s, sums, _):
        assert [tensor.unique().tolist() for tensor in sums.take(s.weights[1:]).values()] == [[3]]
        sums.fetch(s.placed.unit)
        assert [tensor.unique().tolist() for tensor in sums.take(s.weights).values()] == [[2]]
        assert sums.take(s.weights) == {}


def test_taking_a_part_of_the_fetched_sums() -> None:
    with summed(2, 3, 4) as (s, sums, _):
        sums.fetch(s.placed.unit)
        for weight, value in ((s.weights[1], 3), (s.weights[0], 2), (s.weights[2], 4)):
            assert [tensor.unique().tolist() for tensor in sums.take([weight]).values()] == [[value]]


def test_gradients_set_by_a_user() -> None:
    """They lie anywhere, and in any order of dimensions."""
    with summed(2, 3) as (s, sums, _):
        given = torch.arange(6.0).view(3, 2).t()
        s.masters[0].grad = given
        taken = sums.take(s.weights)
        assert torch.equal(taken[s.weights[0]], given)
        assert taken[s.weights[1]].unique().tolist() == [3]
        assert uploads(s) == 2


def test_gradients_given_other_memory() -> None:
    """The home still has what was there before."""
    with summed(2, 3) as (s, sums, _):
        s.masters[0].grad.data = torch.full((2, 3), 5.0)
        sums.fetch(s.placed.unit)
        assert [tensor.unique().tolist() for tensor in sums.take(s.weights).values()] == [[5], [3]]


def test_nothing_is_fetched_before_the_last_micro_batch() -> None:
    with summed(2, 3) as (s, sums, replicas):
        replicas.accumulates = True
        sums.fetch(s.placed.unit)
        assert uploads(s) == 0


def test_pending_scaling_is_applied_to_a_sum_first() -> None:
    """Clipping between micro-batches."""
    with summed(2, 3) as (s, sums, _):
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        assert [tensor.unique().tolist() for tensor in sums.take(s.weights).values()] == [[1], [1.5]]


def test_memory_is_kept_until_a_copy_has_ended() -> None:
    """Also of what nobody takes."""
    with summed(2, 3) as (s, sums, _):
        sums.fetch(s.placed.unit)
        sums.forget()
        backend = cast("RecordingBackend", s.backend)
        assert backend.said("upload", "wait") == ["upload", "wait"]
        assert s.gradients() == [[2], [3]]


def test_stepping_an_unaveraged_sum_is_an_error() -> None:
    with summed(2, 3) as (s, sums, _):
        with pytest.raises(RuntimeError, match="gradient of 'unit.0' would be stepped before it was averaged"):
            sums.check_averaged(s.weights)
        sums.take(s.weights)
        sums.check_averaged(s.weights)
