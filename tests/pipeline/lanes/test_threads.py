"""How many threads share an operation on host memory: on a machine made of files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.pipeline import Pipeline, PipelineOptions, host_memory
from sp_lightning.pipeline.lanes import accelerator
from sp_lightning.pipeline.lanes.lanes import Job

from ..parts import host_backend

DEVICE = torch.device("meta")  # any device that is not the CPU


@pytest.fixture(autouse=True)
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cores, each of which is two threads."""
    for core in range(16):
        file = tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{core % 8},{core % 8 + 8}\n")
    for name in ("_CORES", "_PROCESSES", "_CONTROL_GROUPS"):
        monkeypatch.setattr(host_memory, name, tmp_path)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return tmp_path


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
    assert accelerator._threads(DEVICE, processes) == expected
    assert accelerator._threads(torch.device("cpu"), processes) is None  # sums are rounded as elsewhere


@pytest.mark.parametrize(
    ("limits", "expected"),
    [(("max", "max", "400000"), 3), (("600000", "max", "max"), 5), (("max", "50000", "300000"), 1), (("max",) * 3, 6)],
)
def test_a_container_may_have_less_of_their_time(limits: tuple[str, ...], expected: int, cores: Path) -> None:
    """One of four cores, on a machine of 48, ran 36 threads."""
    (cores / "self").mkdir()
    (cores / "self/cgroup").write_text("0::/pod/job\n")
    (cores / "pod/job").mkdir(parents=True)
    for folder, limit in zip((".", "pod", "pod/job"), limits, strict=True):
        (cores / folder / "cpu.max").write_text(f"{limit} 100000\n")
    assert accelerator._threads(DEVICE, 1) == expected


def test_a_system_that_does_not_tell_of_cores(cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CORES", cores / "missing")
    assert accelerator._threads(DEVICE, 1) == 12


def test_threads_set_by_the_user_are_kept_unless_torchrun_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun` sets the variable, too, and means the processes that it has not started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert accelerator._threads(DEVICE, 1) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert accelerator._threads(DEVICE, 1) == 6


def seen_by(backend: Any) -> int:
    """Torch's number of threads where the backend works on host memory."""
    seen: list[int] = []
    backend.work(Job(lambda: seen.append(torch.get_num_threads()))).join()
    return seen[0]


def test_the_number_holds_in_one_thread_alone() -> None:
    usual = torch.get_num_threads()
    later: list[int] = []
    with host_backend(threads=usual + 2) as backend:
        assert seen_by(backend) == usual + 2
        torch.ones(1 << 16).mul(2)
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (usual, [usual])
        backend.work(Job(lambda: torch.ones(1 << 16).mul_(2))).join()
        assert seen_by(backend) == usual + 2


def test_the_option_reaches_the_thread() -> None:
    with Pipeline(nn.Linear(2, 2), "cpu", options=PipelineOptions(host_threads=3)) as pipeline:
        assert seen_by(pipeline.backend) == 3
