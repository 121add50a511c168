"""Memory for tensors that travel together, hidden from forked processes."""

from __future__ import annotations

import os
import sys
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
def test_forked_processes_share_nothing_with_a_device() -> None:
    """Beside an accelerator, a shared page would be copied behind its back."""
    in_processes([shares_nothing_with_a_device], count=1)
