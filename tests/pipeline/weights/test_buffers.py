"""Memory for tensors that travel together, hidden from forked processes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.weights.buffers import HostBuffer

from ...processes import in_processes


def shares_nothing_with_a_device() -> None:
    def seen_by_a_worker(memory: Tensor) -> int:
        child = os.fork()
        if not child:
            os._exit(int(memory[0]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for kind, seen in (("cpu", 7), ("cuda", 0)):
        backend: Any = SimpleNamespace(device=torch.device(kind))
        buffer = HostBuffer(8, backend, pin=False)
        memory = buffer.bytes.fill_(7)
        assert seen_by_a_worker(memory) == seen
        buffer.release()
        assert seen_by_a_worker(memory) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can hide memory from forked processes")
@pytest.mark.usefixtures("server")
def test_forked_processes_share_nothing_with_a_device() -> None:
    """Beside an accelerator, a shared page would be copied behind its back."""
    in_processes([shares_nothing_with_a_device], count=1)


def flags_of(address: int) -> list[str]:
    """What Linux notes about the mapping that has an address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_huge_pages_are_asked_for_before_memory_is_pinned() -> None:
    """Pinning locks page by page, and a page that is locked stays as small as it is."""
    when_pinned = []

    def pin(memory: Tensor) -> bool:
        when_pinned.append(flags_of(memory.data_ptr()))
        return True

    backend: Any = SimpleNamespace(device=torch.device("cuda"), pins=True, pin=pin, unpin=lambda _: None)
    buffer = HostBuffer(1 << 22, backend, pin=True)
    assert ["hg" in flags for flags in when_pinned] == [True]
    buffer.release()
