"""Backends and their threads: copies in order, tickets that mean it, errors that surface, threads that end."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Job, Worker

from ...helpers import PATIENCE
from ..parts import PendingTicket, host_backend


def filled(value: int, count: int = 64) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("superpipeline", "test"))}


def test_the_most_urgent_job_that_is_ready_runs_first() -> None:
    worker, done, gate = Worker("test-thread"), list[str](), threading.Event()
    worker.submit(Job(lambda: (gate.wait(PATIENCE), None)[1]))
    worker.submit(Job(lambda: done.append("given first"), rank=9))
    worker.submit(
        Job(lambda: done.append("not ready"), [worker.submit(Job(lambda: done.append("before it"), rank=8))], rank=0)
    )
    worker.submit(Job(lambda: done.append("urgent"), rank=1))
    worker.submit(Job(lambda: done.append("as urgent"), rank=1))
    gate.set()
    worker.close()
    assert done == ["urgent", "as urgent", "before it", "not ready", "given first"]


def test_an_error_surfaces_where_it_is_waited_for() -> None:
    """What comes after it is not run, and fails, too; cleanups are. The thread goes on with the next job."""
    done: list[str] = []
    worker = Worker("test-thread")

    def fail() -> None:
        raise OSError("no such memory")

    failed = worker.submit(Job(fail, cleanup=lambda: done.append("first cleanup")))
    after = worker.submit(Job(pytest.fail, [failed], cleanup=lambda: done.append("second cleanup")))
    worker.submit(Job(lambda: done.append("another")))
    for job in (failed, after):
        with pytest.raises(OSError, match="no such memory"):
            job.join()
    with pytest.raises(OSError, match="no such memory"):
        worker.submit(Job(cleanup=fail)).join()
    worker.submit(Job()).join()
    worker.close()
    assert done == ["first cleanup", "second cleanup", "another"]
    assert names() == set()


def test_copies_hold_up_no_others() -> None:
    """Uploads and downloads overlap, as on a device with two copy engines; one that waits for work is no obstacle."""
    with host_backend(poison=True) as backend:
        step, slot = PendingTicket(), filled(0)
        late = backend.upload(slot, filled(7), step)
        backend.upload(filled(0), filled(1)).join()
        backend.download(filled(0), filled(1)).join()
        assert not late.done
        assert set(slot.tolist()) == {255}
        step.finish()
        backend.wait(late)
        assert set(slot.tolist()) == {7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_poison_stands_where_nothing_may_be_read(dtype: torch.dtype) -> None:
    """A read before the wait must show as NaN and not as last step's weight."""
    with host_backend(poison=True) as backend:
        memory, gate = backend.allocate(64), threading.Event()
        assert memory.view(dtype).isnan().all()
        memory.zero_()
        backend.invalidate(memory)
        assert memory.view(dtype).isnan().all()
        memory.zero_()
        backend._up.submit(Job(lambda: (gate.wait(PATIENCE), None)[1]))
        ticket = backend.upload(memory, filled(0))
        assert memory.view(dtype).isnan().all()
        gate.set()
        backend.wait(ticket)
        assert not memory.any()
