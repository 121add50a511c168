"""How many threads share an operation on host memory: on a machine made of files."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes import devices

DEVICE = torch.device("meta")  # any device that is not the CPU


@pytest.fixture(autouse=True)
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cores, each of which is two threads."""
    for core in range(16):
        file = tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{core % 8},{core % 8 + 8}\n")
    monkeypatch.setattr(devices, "_CORES", tmp_path)
    monkeypatch.setattr(devices, "core_limit", lambda: math.inf)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("limit", "processes", "expected"), [(4.0, 1, 3), (4.0, 2, 1), (0.5, 1, 1), (64.0, 1, 6)])
def test_time_on_the_cores_that_a_container_may_have(
    limit: float, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(devices, "core_limit", lambda: limit)
    assert devices._threads(DEVICE, processes) == expected


@pytest.mark.parametrize(
    ("allowed", "processes", "expected"),
    [
        (range(16), 1, 6),  # but for a quarter
        (range(16), 2, 3),
        (range(16), 64, 1),
        ({0, 1, 4, 8, 12}, 1, 2),  # of which two pairs are one core each
        ({4}, 1, 1),
    ],
)
def test_cores_that_the_process_may_use(
    allowed: Any, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    assert devices._threads(DEVICE, processes) == expected
    assert devices._threads(torch.device("cpu"), processes) is None  # sums are rounded as elsewhere


def test_a_system_that_does_not_tell_of_cores(cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CORES", cores / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert devices._threads(DEVICE, 1) == 12


@pytest.mark.parametrize(("launched", "expected"), [(False, None), (True, 6)])
def test_threads_set_by_the_user_are_kept_unless_torchrun_set_them(
    monkeypatch: pytest.MonkeyPatch, launched: bool, expected: int | None
) -> None:
    """`torchrun` sets the variable, too, and means the processes that it has not started."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert devices._threads(DEVICE, 1) == expected


def seen_by(backend: Any) -> int:
    """Torch's number of threads where the backend works on host memory."""
    seen: list[int] = []
    backend.work(lambda: seen.append(torch.get_num_threads())).join()
    return seen[0]


def test_the_number_holds_in_one_thread_alone() -> None:
    usual = torch.get_num_threads()
    backend = HostBackend(threads=usual + 2)
    later: list[int] = []
    try:
        assert seen_by(backend) == usual + 2
        torch.ones(1 << 16).mul(2)
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (usual, [usual])
        backend.work(lambda: torch.ones(1 << 16).mul_(2)).join()
        assert seen_by(backend) == usual + 2
    finally:
        backend.close()


def test_the_option_reaches_the_thread() -> None:
    pipeline = Pipeline(nn.Linear(2, 2), "cpu", options=PipelineOptions(host_threads=3))
    try:
        assert seen_by(pipeline.backend) == 3
    finally:
        pipeline.detach()
