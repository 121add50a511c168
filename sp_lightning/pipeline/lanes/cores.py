"""How many cores work on host memory, and which.

One thread accumulates gradients and steps optimizers, while another one launches kernels and other processes load
data. Its operations have a thread count of their own, so that they neither take every core nor are left with the one
that a launcher grants. On machines with several NUMA nodes they run near the device, where pinned memory is, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

_SYSTEM = Path("/sys")
_ONE_LEFT_FREE_IN = 4  # one core in four, and at least one, is left to the training loop and data loaders
_BOUND_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class HostCores(NamedTuple):
    """The cores on which work on host memory runs."""

    threads: int | None = None  # how many threads share an operation; None for as many as torch uses elsewhere
    # the cores near the device; empty if all are equally near, or if that is unknown
    near: frozenset[int] = frozenset()

    def occupy(self) -> None:
        """Bind the calling thread, and the threads that it starts, to these cores from now on."""
        if self.near:
            os.sched_setaffinity(0, self.near)
        if self.threads is not None:
            usual = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            # This sets the count of this thread, and the default of later ones, which another thread restores.
            other = threading.Thread(target=torch.set_num_threads, args=(usual,))
            other.start()
            other.join()

    @contextmanager
    def nearby(self) -> Iterator[None]:
        """Run the calling thread near the device, so that memory which it is the first to touch is placed there."""
        if not self.near:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.near)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


ANYWHERE = HostCores()


def choose_cores(device: torch.device, threads: int | Literal["auto"], processes: int = 1) -> HostCores:
    """Choose the cores for work on host memory beside a device.

    Args:
        device: The device. If it is the CPU, the default is torch's own thread count, so that sums are those of plain
            training.
        threads: The user's choice.
        processes: How many processes like this one share the machine.
    """
    if device.type == "cpu":
        return HostCores(None if threads == "auto" else threads)
    allowed = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    near = allowed & _read_cores(_SYSTEM / f"devices/system/node/node{_node_of(device)}/cpulist")
    if near == allowed or any(name in os.environ for name in _BOUND_BY_USER):
        near = frozenset()
    if threads != "auto":
        return HostCores(threads, near)
    if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return HostCores(torch.get_num_threads(), near)  # `torchrun` sets it, too, to spare its other processes
    cores = max(1, _physical(near or allowed) // processes)
    return HostCores(max(1, cores - max(1, cores // _ONE_LEFT_FREE_IN)), near)


def _node_of(device: torch.device) -> str:
    """Return the NUMA node that a device is attached to; "-1" if there is one alone, or it is not known."""
    properties = torch.get_device_module(device).get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return (_SYSTEM / "bus/pci/devices" / address / "numa_node").read_text().strip()
    except (AttributeError, OSError):
        return "-1"


def _physical(cores: frozenset[int]) -> int:
    """Count the physical cores among these: hyperthreads of one core count once."""
    siblings = {
        _read_cores(_SYSTEM / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list") & cores
        or frozenset({core})
        for core in cores
    }
    return len(siblings)


def _read_cores(path: Path) -> frozenset[int]:
    """Parse a file with a list of cores as Linux writes it ("0-3,8"); empty if there is no such file."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return frozenset()
    return frozenset(core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1))
