"""Host memory on loan: used again, never much more than what was in use at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sp_lightning.pipeline.activations.memory import HostPool

from ..parts import RecordingBackend, bytes_lent

PAGE = 4096


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend(pins=True)


@pytest.fixture
def pool(backend: RecordingBackend) -> Iterator[HostPool]:
    made = HostPool(backend)
    yield made
    made.close()
    assert not backend.pinned


def test_growing_steps_do_not_pile_up(pool: HostPool) -> None:
    """Other sizes each step, as with sentences of any length: what has become useless makes room."""
    most = 0
    for step in range(20):
        loans = [pool.take((step + 2) * PAGE + 7) for _ in range(6)]
        most = max(most, bytes_lent(pool))
        for loan in loans:
            pool.give_back(loan)
    assert pool.held <= 1.5 * most


def test_memory_is_given_up_only_when_no_copy_can_read_it(pool: HostPool, backend: RecordingBackend) -> None:
    loans = [pool.take(2 * PAGE) for _ in range(3)]
    for loan in loans:
        pool.give_back(loan)
    assert backend.said("drain") == []
    pool.take(4 * PAGE)
    assert backend.said("drain") == ["drain"]
