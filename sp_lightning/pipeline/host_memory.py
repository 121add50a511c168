"""How much memory the host has, and how much of it is free.

A container, or a job of a cluster, may have less than its machine: Linux puts it into a *control group* with a limit,
which may lie in others with limits of their own. A process that exceeds one is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def available_host_memory() -> int | None:
    """Return the bytes of host memory that are free now, or None if the system does not report it."""
    free = _number_after("MemAvailable:", _PROCESSES / "meminfo")
    return None if free is None else min([free * 1024, *(free for _, free in _control_groups())])


def total_host_memory() -> int | None:
    """Return the bytes of host memory, or None if the system does not report it."""
    total = _number_after("MemTotal:", _PROCESSES / "meminfo")
    return None if total is None else min([total * 1024, *(limit for limit, _ in _control_groups())])


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield the limit, and what is free, of each group (of version 2) that this process is in, from the innermost."""
    for line in _read(_PROCESSES / "self" / "cgroup").splitlines():
        if not line.startswith("0::"):
            continue
        # In a container, the path may be the one on the machine, which is not visible here; then the root is its group.
        inner = _CONTROL_GROUPS / line[3:].strip("/")
        for folder in (inner, *inner.parents):
            limit, used = (_read(folder / name).strip() for name in ("memory.max", "memory.current"))
            if folder.is_relative_to(_CONTROL_GROUPS) and limit.isdecimal() and used.isdecimal():
                cache = _number_after("inactive_file", folder / "memory.stat") or 0  # given up when memory is needed
                yield int(limit), max(0, int(limit) - int(used) + cache)


def _number_after(word: str, path: Path) -> int | None:
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [word]), None)


def _read(path: Path) -> str:
    """Return what a file of the kernel says; nothing if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
