"""Host memory: how much there is, how much is free, and the peak of a process.

A container may have less than its machine; the smaller number counts. Some virtual machines begin with little memory
and get more as it is used, so they report too little at first: `grow` makes them provide it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory

_LARGEST_PIECE, _LEAST_PIECE = 1 << 30, 1 << 24  # what is allocated at once
_KEPT = 0.04  # of all memory: twice the reserve below which the benchmark ends a process
_PATIENCE = 15.0  # seconds without progress before giving up


def total_bytes() -> int:
    """Return the total memory of this machine or container."""
    return total_host_memory() or 0


def free_bytes() -> int:
    """Return the memory that a new process could have; file caches count as free."""
    return available_host_memory() or 0


def grow(target: int) -> dict[str, float]:
    """Allocate memory, piece by piece, until `target` is reached or no more comes, and give it back.

    Args:
        target: Bytes that should be allocated or free.

    Returns:
        What was free before, the most that was allocated and free together, and how many seconds it took.
    """
    taken: list[Any] = []
    begin = changed = time.monotonic()
    free_before = most = free_bytes()
    while most < target and time.monotonic() - changed < _PATIENCE:
        free = free_bytes()
        reached = sum(map(len, taken)) + free
        if reached > most:
            most, changed = reached, time.monotonic()
        room = min(free - int(_KEPT * total_bytes()), _LARGEST_PIECE)
        if room >= _LEAST_PIECE:
            taken.append(_take(room))
            changed = time.monotonic()
        else:
            time.sleep(0.05)
    return {"free_before": free_before, "free_after": most, "seconds": time.monotonic() - begin}


def _take(nbytes: int) -> Any:
    return torch.ones(nbytes, dtype=torch.uint8)  # written to by all cores at once


def peak_bytes() -> int:
    """Return the peak resident memory of this process, including its own pinned memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
