"""Backends and their threads: copies in order, tickets that mean it, errors that surface, threads that end."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.threads import CopyThread, ThreadTicket, Worker, copy_memory

from ..parts import DoneTicket, PendingTicket, RecordingBackend, host_backend


def filled(value: int, count: int = 64) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("superpipeline", "test"))}


def test_the_job_that_is_ready_first_runs_first() -> None:
    """Also if nothing was possible when the thread looked for work."""
    worker, done = Worker("test-thread"), list[str]()
    early, late = ThreadTicket(), ThreadTicket()
    first = worker.submit(lambda: done.append("given first"), [early], rank=9)
    second = worker.submit(lambda: done.append("more urgent"), [late], rank=1)
    time.sleep(0.05)
    early.finish()
    first.join()
    late.finish()
    second.join()
    worker.close()
    assert done == ["given first", "more urgent"]


def test_work_may_wait_for_work_that_is_less_urgent() -> None:
    """It was given before, so the thread does not wait for itself."""
    worker, done, gate = Worker("test-thread"), list[str](), ThreadTicket()
    before = worker.submit(lambda: done.append("before"), [gate], rank=9)
    after = worker.submit(lambda: done.append("after"), [before], rank=1)
    gate.finish()
    after.join()
    worker.close()
    assert done == ["before", "after"]


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
        assert all(ticket.done for ticket in tickets)


def test_a_copy_in_one_direction_does_not_hold_up_the_other() -> None:
    """Uploads and downloads overlap, as on a device with two copy engines."""
    with host_backend() as backend:
        gate = threading.Event()
        backend._up.submit(lambda: (gate.wait(5), None)[1])
        late = backend.upload(filled(0), filled(1))
        early = backend.download(filled(0), filled(1))
        early.join()
        assert not late.done
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


def test_drain_waits_for_both_directions_and_for_work() -> None:
    with host_backend(max_delay=0.01) as backend:
        tickets = [backend.upload(filled(0), filled(1)), backend.download(filled(0), filled(1))]
        tickets.append(backend.work(lambda: None))
        backend.drain()
        assert all(ticket.done for ticket in tickets)


def test_close_finishes_all_jobs_and_ends_the_threads() -> None:
    with host_backend(max_delay=0.005) as backend:
        target = torch.zeros(64, dtype=torch.uint8)
        for value in range(1, 4):
            backend.upload(target, filled(value))
        backend.download(filled(0), filled(1))
        worked: list[int] = []
        backend.work(lambda: worked.append(1))
        assert names() == {"superpipeline-upload", "superpipeline-download", "superpipeline-host"}
        backend.close()
        assert names() == set()
        assert set(target.tolist()) == {3}
        assert worked == [1]
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
    """And the thread goes on with the next job."""

    def fail() -> None:
        raise OSError("no such memory")

    done: list[int] = []
    thread = CopyThread("test-thread")
    ticket = thread.submit(fail)
    after = thread.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="no such memory"):
        ticket.join()
    after.join()
    thread.drain()
    thread.close()
    assert done == [1]
    assert names() == set()


def fail() -> None:
    raise OSError("no such cores")


@pytest.mark.parametrize("thread", [Worker("worker", fail), CopyThread("copies", fail)], ids=["worker", "copies"])
def test_a_thread_that_cannot_start_raises_in_every_join(thread: Worker | CopyThread) -> None:
    tickets = [thread.submit(pytest.fail), thread.submit(pytest.fail)]
    for ticket in tickets:
        with pytest.raises(OSError, match="no such cores"):
            ticket.join()
    thread.close()


def test_jobs_run_in_order_in_one_thread() -> None:
    thread, seen = CopyThread("test-thread"), list[tuple[int, str]]()
    for number in range(20):
        thread.submit(lambda number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
    thread.close()
    assert seen == [(number, "test-thread") for number in range(20)]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_memory_is_copied_byte_by_byte(count: int) -> None:
    """Not `Tensor.copy_`, which in a second thread would start a second pool of OpenMP threads."""
    source = torch.randn(count)
    target = torch.full((count,), float("nan"))
    copy_memory(target, source)
    assert torch.equal(target, source)


def test_defaults_of_a_backend() -> None:
    """Synchronising is joining; no backend page-locks, or knows its memory, unless it says so."""
    with host_backend() as backend:
        assert not backend.can_pin
        assert not backend.pin(filled(0))
        assert backend.total_memory() is None
        with pytest.raises(NotImplementedError, match="HostBackend pins nothing"):
            backend.unpin(filled(0))
    with pytest.raises(OSError, match="lost"):
        RecordingBackend().synchronize(DoneTicket(OSError("lost")))


# ------------------------------------------------------------------------------------------------ after other work


def test_a_job_that_waits_holds_up_no_other() -> None:
    """It takes its place in the queue when what it waits for is done, before anybody can see that."""
    thread, tickets, seen = CopyThread("test-thread"), [PendingTicket(), PendingTicket()], list[str]()
    jobs = [
        thread.submit(lambda: seen.append("after the first ticket"), tickets[0]),
        thread.submit(lambda: seen.append("after the second ticket"), tickets[1]),
    ]
    thread.submit(lambda: seen.append("at once")).join()
    assert not thread.busy
    for ticket, job in reversed([*zip(tickets, jobs, strict=True)]):
        ticket.finish()
        thread.drain()
        assert job.done
    assert seen == ["at once", "after the second ticket", "after the first ticket"]
    thread.close()


def test_a_thread_is_busy_until_its_queue_is_empty() -> None:
    thread, gate = CopyThread("test-thread"), threading.Event()
    thread.submit(lambda: (gate.wait(10), None)[1])
    last = thread.submit(lambda: None)
    assert thread.busy
    gate.set()
    last.join()
    assert not thread.busy
    thread.close()


def test_callbacks_run_before_a_job_counts_as_done() -> None:
    """Those that are given later, or meanwhile, are called, too."""
    ticket, seen = ThreadTicket(), list[tuple[str, bool]]()

    def callback() -> None:
        seen.append(("before", ticket.done))
        ticket.when_done(lambda: seen.append(("meanwhile", ticket.done)))

    ticket.when_done(callback)
    assert seen == []
    ticket.finish()
    ticket.when_done(lambda: seen.append(("later", ticket.done)))
    assert seen == [("before", False), ("meanwhile", False), ("later", True)]


def test_a_callback_of_a_ticket_without_a_thread_is_called_at_once() -> None:
    seen: list[int] = []
    DoneTicket().when_done(lambda: seen.append(1))
    assert seen == [1]


def test_a_job_whose_predecessor_failed_is_not_run() -> None:
    """It would read what was never written; whoever waits for it is told why. The thread goes on."""
    thread, seen = CopyThread("test-thread"), list[int]()
    failed = thread.submit(lambda: seen.append(1), DoneTicket(OSError("the bus is gone")))
    third = thread.submit(lambda: seen.append(2), failed)
    last = thread.submit(lambda: seen.append(3))
    for ticket in (failed, third):
        with pytest.raises(OSError, match="the bus is gone"):
            ticket.join()
    last.join()
    thread.close()
    assert seen == [3]


@pytest.mark.parametrize("outcome", ["done", "failed", "not run"])
def test_references_of_a_job_are_gone_before_its_ticket_is_done(outcome: str) -> None:
    """Whether a gradient is held by somebody else is seen from the references to it."""

    class Held:
        pass

    def job(held: Held) -> None:
        if outcome == "failed":
            raise OSError

    thread = CopyThread("test-thread")
    for _ in range(50):
        held = Held()
        reference = weakref.ref(held)
        after = DoneTicket(OSError()) if outcome == "not run" else None
        ticket = thread.submit(lambda held=held: job(held), after)  # type: ignore[misc]
        del held
        while not ticket.done:
            pass
        if outcome == "failed":  # the traceback has the frames
            assert ticket.error is not None
            ticket.error = ticket.error.with_traceback(None)
        assert reference() is None
    gc.collect()
    thread.close()


def test_a_copy_to_the_device_starts_after_work_on_the_host() -> None:
    """It brings what the work has written, and holds up no other copy."""
    with host_backend(poison=True, max_delay=0.003) as backend:
        gate = threading.Event()
        source, slot, other = filled(0), filled(0), filled(0)
        step = backend.work(lambda: (gate.wait(10), source.fill_(7))[1])  # type: ignore[arg-type,return-value]
        after_step = backend.upload(slot, source, step)
        backend.upload(filled(0), filled(9)).join()
        backend.download(other, filled(5)).join()
        assert not after_step.done
        assert set(slot.tolist()) == {255}
        gate.set()
        after_step.join()
        assert set(slot.tolist()) == {7}


def test_a_copy_after_failed_work_fails() -> None:
    """The masters may be half stepped."""

    def fail() -> None:
        raise ArithmeticError("the optimizer is lost")

    with host_backend() as backend:
        slot = filled(0)
        ticket = backend.upload(slot, filled(1), backend.work(fail))
        with pytest.raises(ArithmeticError, match="the optimizer is lost"):
            backend.wait(ticket)
        assert set(slot.tolist()) == {0}
        backend.upload(slot, filled(2)).join()
        assert set(slot.tolist()) == {2}


def test_work_waits_for_copies_and_is_done_in_order() -> None:
    """Gradients land, are added, and step: in one thread, which is not the one that computes."""
    with host_backend(poison=True, max_delay=0.003) as backend:
        total, threads = filled(0), set[str]()
        for value in range(1, 6):
            arrived = filled(0)
            ticket = backend.download(arrived, filled(value))

            def add(arrived: Tensor = arrived) -> None:
                threads.add(threading.current_thread().name)
                total.mul_(2).add_(arrived)

            last = backend.work(add, [ticket])
        last.join()
        expected = 0
        for value in range(1, 6):
            expected = 2 * expected + value
        assert set(total.tolist()) == {expected}
        assert threads == {"superpipeline-host"}


def test_drain_waits_for_chains_of_copies_and_work() -> None:
    """A copy to the host, work with it, a copy of that to the device."""
    with host_backend(poison=True, max_delay=0.01) as backend:
        gradient, weight, slot = filled(0), filled(1), filled(0)
        arrived = backend.download(gradient, filled(3))
        step = backend.work(lambda: (weight.add_(gradient), None)[1], [arrived])
        sent = backend.upload(slot, weight, step)
        backend.drain()
        assert arrived.done
        assert step.done
        assert sent.done
        assert set(slot.tolist()) == {4}
