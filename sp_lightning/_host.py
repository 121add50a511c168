"""The host as the optimizer's machine: all of its cores."""

from __future__ import annotations

import os

import torch


def use_all_cores() -> int | None:
    """Give torch every core that this process may use, if a launcher left it with one thread.

    `torchrun` sets `OMP_NUM_THREADS=1` to spare the cores for its other processes. Here there are none, and the
    optimizer steps on the host: on one thread it would take as many times longer as there are cores. A user's own
    `OMP_NUM_THREADS=1` outside of `torchrun` is a choice, and kept.

    Returns:
        The number of threads that torch had, to be restored later, or `None` if nothing was changed.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    chosen = "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if threads > 1 or cores == 1 or chosen:
        return None
    torch.set_num_threads(cores)
    return threads
