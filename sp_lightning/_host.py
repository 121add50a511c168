"""The host as the optimizer's machine: all of its cores."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.transfer.cores import allowed_cores, user_chose_threads


def use_all_cores(processes: int = 1) -> int | None:
    """Give torch this process's share of the cores, if a launcher left it with one thread.

    `torchrun` sets `OMP_NUM_THREADS=1` to spare the cores for its other processes. The optimizer steps on the host
    here: on one thread it would take as many times longer as there are cores. A user's own `OMP_NUM_THREADS=1` outside
    of `torchrun` is a choice, and kept.

    Args:
        processes: How many processes like this one share the machine.

    Returns:
        The number of threads that torch had, to be restored later, or `None` if nothing was changed.
    """
    cores, threads = len(allowed_cores()) // processes, torch.get_num_threads()
    if threads > 1 or cores <= 1 or user_chose_threads():
        return None
    torch.set_num_threads(cores)
    return threads
