"""How many cores work on host memory, and which: on a machine made of files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline import AcceleratorBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes import cores
from sp_lightning.pipeline.lanes.cores import HostCores, choose_cores
from sp_lightning.pipeline.lanes.emulated import HostBackend

from ..parts import pretend_a_device

DEVICE = torch.device("meta")  # any device that is not the CPU

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to cores on Linux only")


class Machine:
    """Two nodes with four cores each, which are two threads each; the device is attached to the second node."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.allowed = set(range(16))
        self.device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        self.write("bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
        self.write("devices/system/node/node0/cpulist", "0-3,8-11\n")
        self.write("devices/system/node/node1/cpulist", "4-7,12-15\n")
        for core in range(16):
            self.write(f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 8},{core % 8 + 8}\n")
        monkeypatch.setattr(cores, "_SYSTEM", root)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: self.allowed, raising=False)
        module = SimpleNamespace(get_device_properties=lambda _: self.device)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", *cores._BOUND_BY_USER):
            monkeypatch.delenv(name, raising=False)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (range(16), HostCores(3, frozenset({4, 5, 6, 7, 12, 13, 14, 15}))),  # but for a quarter
        ({0, 1, 4, 5, 12}, HostCores(1, frozenset({4, 5, 12}))),  # 4 and 12 are one core
        ({0, 1, 2, 3}, HostCores(3, frozenset())),  # bound to the other node
        ({4}, HostCores(1, frozenset())),
    ],
)
def test_cores_near_the_device_that_the_process_may_use(machine: Machine, allowed: Any, expected: HostCores) -> None:
    machine.allowed = set(allowed)
    assert choose_cores(DEVICE, "auto") == expected
    assert choose_cores(DEVICE, 7) == HostCores(7, expected.near)
    assert choose_cores(torch.device("cpu"), "auto") == HostCores(None, frozenset())  # sums are rounded as elsewhere


@pytest.mark.parametrize(("launched", "expected"), [(False, 1), (True, 3)])
def test_threads_set_by_the_user_are_kept_unless_torchrun_set_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, launched: bool, expected: int
) -> None:
    """`torchrun` sets the variable, too, and means the processes that it has not started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert torch.get_num_threads() == 1
    assert choose_cores(DEVICE, "auto").threads == expected


def seen_by(backend: Any) -> int:
    """Torch's number of threads where the backend works on host memory."""
    seen: list[int] = []
    backend.work(lambda: seen.append(torch.get_num_threads())).join()
    return seen[0]


def test_the_number_holds_in_one_thread_alone() -> None:
    usual = torch.get_num_threads()
    backend = HostBackend(cores=HostCores(usual + 2))
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


@linux
@pytest.mark.parametrize("fails", [False, True])
def test_nearby_is_left_again(fails: bool) -> None:
    allowed = os.sched_getaffinity(0)
    one = frozenset({min(allowed)})
    try:
        with HostCores(None, one).nearby():
            assert os.sched_getaffinity(0) == one
            if fails:
                raise InterruptedError
    except InterruptedError:
        pass
    assert os.sched_getaffinity(0) == allowed


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """On which cores memory was page-locked, on a pretended CUDA device."""
    seen: list[set[int]] = []

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            seen.append(os.sched_getaffinity(0))
            return 0

        def cudaHostUnregister(self, _: int) -> None:
            pass

    monkeypatch.setattr("sp_lightning.pipeline.lanes.accelerator._cudart", Runtime)
    monkeypatch.setattr(AcceleratorBackend, "can_pin", True)
    return seen


@linux
def test_memory_is_page_locked_near_the_device(registered: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that page-locks memory is the first to touch it, and decides where it is."""
    pretend_a_device(monkeypatch)
    one = frozenset({min(os.sched_getaffinity(0))})
    backend = AcceleratorBackend(torch.device("cpu"), cores=HostCores(None, one))
    memory: Tensor = torch.empty(16, dtype=torch.uint8)
    assert backend.pin(memory)
    backend.unpin(memory)
    backend.close()
    assert registered == [one]


def test_the_option_reaches_the_thread() -> None:
    pipeline = Pipeline(nn.Linear(2, 2), "cpu", options=PipelineOptions(host_threads=3))
    try:
        assert seen_by(pipeline.backend) == 3
    finally:
        pipeline.detach()
