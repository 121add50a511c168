"""Backends and their threads: copies in order, tickets that mean it, errors that surface, threads that end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.threads import Lane, copy_memory

from .parts import DoneTicket, RecordingBackend, host_backend


def filled(value: int, count: int = 64) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("superpipeline", "test-lane"))}


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_copy_has_landed_when_its_ticket_says_so(direction: str) -> None:
    with host_backend(max_delay=0.01, seed=1) as backend:
        for value in range(5):
            target = torch.zeros(64, dtype=torch.uint8)
            ticket = getattr(backend, direction)(target, filled(value))
            backend.wait(ticket)
            assert set(target.tolist()) == {value}


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_copies_of_one_direction_keep_their_order(direction: str) -> None:
    """A slot that is given away twice holds what came last, whatever the delays."""
    with host_backend(max_delay=0.003) as backend:
        target = torch.zeros(64, dtype=torch.uint8)
        tickets = [getattr(backend, direction)(target, filled(value)) for value in range(6)]
        backend.synchronize(tickets[-1])
        assert set(target.tolist()) == {5}
        assert all(ticket.done.is_set() for ticket in tickets)


def test_a_copy_in_one_direction_does_not_hold_up_the_other() -> None:
    """Uploads and downloads overlap, as on a device with two copy engines."""
    with host_backend() as backend:
        gate = threading.Event()
        backend._up.submit(lambda: (gate.wait(5), None)[1])
        late = backend.upload(filled(0), filled(1))
        early = backend.download(filled(0), filled(1))
        early.join()
        assert not late.done.is_set()
        gate.set()
        late.join()


def test_poison_stands_where_a_copy_has_not_landed() -> None:
    """A read before the wait must show as NaN and not as last step's weight."""
    with host_backend(poison=True) as backend:
        gate = threading.Event()
        backend._up.submit(lambda: (gate.wait(5), None)[1])
        target = torch.ones(16)
        ticket = backend.upload(target.view(torch.uint8), torch.full((16,), 2.0).view(torch.uint8))
        assert target.isnan().all()
        gate.set()
        backend.wait(ticket)
        assert target.tolist() == [2.0] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_poison_is_nan_in_every_dtype(dtype: torch.dtype) -> None:
    with host_backend(poison=True) as backend:
        memory = backend.allocate(64)
        assert memory.view(dtype).isnan().all()
        memory.zero_()
        backend.invalidate(memory)
        assert memory.view(dtype).isnan().all()


def test_without_poison_memory_is_left_alone() -> None:
    with host_backend() as backend:
        memory = filled(7)
        backend.invalidate(memory)
        assert set(memory.tolist()) == {7}


def test_delays_are_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race that shows with one seed shows again."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        with host_backend(max_delay=0.5, seed=3) as backend:
            for _ in range(4):
                backend.upload(filled(0), filled(1)).join()
    assert slept[:4] == slept[4:]
    assert len(set(slept)) == 4
    assert all(0 <= delay <= 0.5 for delay in slept)


def test_memory_made_under_inference_mode_can_train() -> None:
    with host_backend() as backend, torch.inference_mode():
        assert not backend.allocate(8).is_inference()


def test_drain_waits_for_both_directions() -> None:
    with host_backend(max_delay=0.01) as backend:
        tickets = [backend.upload(filled(0), filled(1)), backend.download(filled(0), filled(1))]
        backend.drain()
        assert all(ticket.done.is_set() for ticket in tickets)


def test_close_does_what_is_left_and_ends_the_threads() -> None:
    with host_backend(max_delay=0.005) as backend:
        target = torch.zeros(64, dtype=torch.uint8)
        for value in range(1, 4):
            backend.upload(target, filled(value))
        backend.download(filled(0), filled(1))
        assert names() == {"superpipeline-upload", "superpipeline-download"}
        backend.close()
        assert names() == set()
        assert set(target.tolist()) == {3}
        backend.close()


def test_no_thread_before_the_first_copy() -> None:
    """A pipeline that is only looked at starts none."""
    with host_backend() as backend:
        backend.allocate(4)
        backend.drain()
        assert names() == set()


def test_a_backend_works_again_after_close() -> None:
    with host_backend() as backend:
        backend.upload(filled(0), filled(1)).join()
        backend.close()
        target = filled(0)
        backend.upload(target, filled(9)).join()
        assert set(target.tolist()) == {9}


def test_an_error_in_a_thread_surfaces_where_it_is_waited_for() -> None:
    """And the lane goes on with the next job."""

    def fail() -> None:
        raise OSError("no such memory")

    done: list[int] = []
    lane = Lane("test-lane")
    ticket = lane.submit(fail)
    after = lane.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="no such memory"):
        ticket.join()
    after.join()
    lane.drain()
    lane.close()
    assert done == [1]
    assert names() == set()


def test_jobs_run_in_order_in_one_thread() -> None:
    lane, seen = Lane("test-lane"), list[tuple[int, str]]()
    for number in range(20):
        lane.submit(lambda number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
    lane.close()
    assert seen == [(number, "test-lane") for number in range(20)]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_memory_is_copied_byte_by_byte(count: int) -> None:
    """Not `Tensor.copy_`, which in a second thread would start a second pool of OpenMP threads."""
    source = torch.randn(count)
    target = torch.full((count,), float("nan"))
    copy_memory(target, source)
    assert torch.equal(target, source)


def test_what_a_backend_does_by_default() -> None:
    """Synchronising is joining; no backend page-locks, or knows its memory, unless it says so."""
    with host_backend() as backend:
        assert not backend.can_pin
        assert not backend.pin(filled(0))
        assert backend.total_memory() is None
        with pytest.raises(NotImplementedError, match="HostBackend pins nothing"):
            backend.unpin(filled(0))
    with pytest.raises(OSError, match="lost"):
        RecordingBackend().synchronize(DoneTicket(OSError("lost")))
