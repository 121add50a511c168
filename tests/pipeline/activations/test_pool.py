"""Host memory on loan: used again, never much more than what was in use at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sp_lightning.pipeline.activations import memory as memory_module
from sp_lightning.pipeline.activations.memory import HostPool
from sp_lightning.pipeline.weights.buffers import HostBuffer

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


def addresses(loans: list[HostBuffer]) -> list[int]:
    return [loan.bytes.data_ptr() for loan in loans]


def test_the_next_step_gets_the_same_memory(pool: HostPool) -> None:
    """Whatever the order in which it comes back."""
    sizes = [300, PAGE, 5000, 10, 700, 700]
    first = [pool.take(nbytes) for nbytes in sizes]
    before, held = addresses(first), pool.held
    random.shuffle(first)
    for loan in first:
        pool.give_back(loan)
    assert bytes_lent(pool) == 0
    assert sorted(addresses([pool.take(nbytes) for nbytes in sizes])) == sorted(before)
    assert pool.held == held


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


def test_a_host_that_is_full_is_an_error_that_says_so(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would not refuse: it would end the process."""
    monkeypatch.setattr(memory_module, "available_host_memory", lambda: 100)
    with pytest.raises(RuntimeError, match="Host memory is too small for offloaded activations.*100 B are free"):
        pool.take(PAGE)
