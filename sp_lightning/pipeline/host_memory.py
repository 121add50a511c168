"""The host's memory, the free part of it, the part that is mapped from files, and the number of usable cores.

A container, or a job of a cluster, may have less than its machine: Linux puts it into a *control group* with limits,
which may be inside others with limits of their own. Linux kills a process that exceeds a limit of memory, and stops one
that exceeds its time on the cores until the next tenth of a second begins.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

_PROCESSES = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_CORES = Path("/sys/devices/system/cpu")
# of the limit and of what is used: in version 2, and in version 1, which has a tree for each controller
_MEMORY_FILES = {"": ("max", "current"), "memory": ("limit_in_bytes", "usage_in_bytes")}
_MADV_PAGEOUT = 21  # Linux 5.4; Python's `mmap` does not name it
_WORTH_RELEASING = 2**20  # bytes: the search for memory to release takes 2 ms


def available_host_memory() -> int | None:
    """Return the bytes of host memory that are free now, or None if the system does not report it."""
    return _least("MemAvailable:", [free for _, free in _memory_limits()])


def has_room_for(nbytes: int) -> bool:
    """Tell whether `nbytes` of host memory are free; True where the system does not report it."""
    free = available_host_memory()
    return free is None or nbytes <= free


def total_host_memory() -> int | None:
    """Return the bytes of host memory, or None if the system does not report it."""
    return _least("MemTotal:", [limit for limit, _ in _memory_limits()])


def _least(word: str, of_groups: list[int]) -> int | None:
    of_machine = _number_after(word, _PROCESSES / "meminfo")
    return None if of_machine is None else min([of_machine * 1024, *of_groups])


def usable_cores() -> int:
    """Return how many cores this process may use, considering also the time on them that its group has.

    Hyperthreads of one core count once.
    """
    is_told = hasattr(os, "sched_getaffinity")
    allowed: Iterable[int] = os.sched_getaffinity(0) if is_told else range(os.cpu_count() or 1)
    siblings = [_CORES / f"cpu{number}/topology/thread_siblings_list" for number in allowed]
    cores = len({_read(file) or file for file in siblings})
    limits = [_read(folder / "cpu.max").split() for folder in _control_groups()]
    shares = [int(time) // int(period) for time, period in filter(None, limits) if time != "max"]
    return max(1, min([cores, *shares]))


def release(copied: list[Tensor]) -> None:
    """Have the system take back the memory of tensors whose values were copied elsewhere; this empties the list.

    A mapping of a file, such as a safetensors checkpoint, would keep its pages until the last tensor of the file is
    gone, and C's allocator keeps blocks below 32 MiB that are freed: the model would be in memory twice. Code that
    still has one of the tensors reads the same values.
    """
    if sys.platform != "linux" or sum(tensor.nbytes for tensor in copied) < _WORTH_RELEASING:
        copied.clear()
        return
    libc, files = ctypes.CDLL(None), list(private_files())
    for tensor in copied:
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(start <= first < stop for start, stop in files):
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            # an older kernel refuses, and nothing is lost
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(end - page), _MADV_PAGEOUT)
    copied.clear()
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def private_files() -> Iterator[tuple[int, int]]:
    """Yield the bounds of memory that is mapped from files, and in which only this process sees its own writes."""
    for line in _read(_PROCESSES / "self" / "maps").splitlines():
        bounds, access, _, _, inode, *_ = line.split()
        if inode != "0" and access.endswith("p"):
            start, stop = bounds.split("-")
            yield int(start, 16), int(stop, 16)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit, and what is free, of each group that this process is in."""
    for controller, names in _MEMORY_FILES.items():
        for folder in _control_groups(controller):
            limit, used = (_read(folder / f"memory.{name}").strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                # given up when memory is needed
                cache = _number_after("inactive_file", folder / "memory.stat") or 0
                yield int(limit), max(0, int(limit) - int(used) + cache)


def _control_groups(controller: str = "") -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, from the innermost; with a controller, of version 1."""
    root = _CONTROL_GROUPS / controller
    for line in _read(_PROCESSES / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers != controller:
            continue
        # In a container, the path may be the one on the machine, which is not visible here; then the root is its group.
        inner = root / path.strip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _number_after(word: str, path: Path) -> int | None:
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [word]), None)


def _read(path: Path) -> str:
    """Return the text of a kernel's file; an empty one if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
