"""Host memory: how much there is, how much is left, and the most that a process took.

A container may have less than its machine; the smaller number counts.
"""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """The memory of this machine or container."""
    limit = _cgroup("memory.max")
    total = _meminfo()["MemTotal"]
    return total if limit is None else min(total, limit)


def free_bytes() -> int:
    """What a new process could have; what is only a cache of files is free."""
    free = _meminfo()["MemAvailable"]
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is None or used is None:
        return free
    return min(free, limit - used + _file_cache())


def peak_bytes() -> int:
    """The most memory that this process has had resident, page-locked memory of its own included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _cgroup(name: str) -> int | None:
    """A number of this container; None if there is no such file, or no limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _file_cache() -> int:
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
