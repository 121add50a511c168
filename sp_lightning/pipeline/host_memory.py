"""How much memory the host has, and how much of it is free.

A container, or a job of a cluster, may have less than its machine: Linux puts it into a *control group* with a limit,
which may lie in others with limits of their own. A process that exceeds one is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROCESSES = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


class _Version(NamedTuple):
    """Where the kernel keeps control groups for memory, and what their files are called."""

    root: Path
    limit: str
    used: str
    file_cache: str  # in memory.stat: counted as used, but given up when memory is needed


class _ControlGroup(NamedTuple):
    limit: int
    free: int


def available_host_memory() -> int | None:
    """Return the bytes of host memory that are free now, or None if the system does not report it."""
    free = _from_meminfo("MemAvailable")
    return None if free is None else min([free, *(group.free for group in _control_groups())])


def total_host_memory() -> int | None:
    """Return the bytes of host memory, or None if the system does not report it."""
    total = _from_meminfo("MemTotal")
    return None if total is None else min([total, *(group.limit for group in _control_groups())])


def _from_meminfo(name: str) -> int | None:
    number = _number_after(f"{name}:", _PROCESSES / "meminfo")
    return None if number is None else number * 1024


def _control_groups() -> Iterator[_ControlGroup]:
    """Yield the groups with a limit that this process is in, from the innermost."""
    for line in _read(_PROCESSES / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = _version(controllers.split(","))
        if version is None:
            continue
        # In a container, the path may be the one on the machine, which is not visible here; then the root is its group.
        inner = version.root / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(version.root):
                limit, used = (_read(folder / name).strip() for name in (version.limit, version.used))
                if limit.isdecimal() and used.isdecimal():
                    cache = _number_after(version.file_cache, folder / "memory.stat") or 0
                    yield _ControlGroup(int(limit), max(0, int(limit) - int(used) + cache))


def _version(controllers: list[str]) -> _Version | None:
    if controllers == [""]:
        return _Version(_CONTROL_GROUPS, "memory.max", "memory.current", "inactive_file")
    if "memory" in controllers:
        old = _CONTROL_GROUPS / "memory"
        return _Version(old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return None


def _number_after(word: str, path: Path) -> int | None:
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [word]), None)


def _read(path: Path) -> str:
    """Return what a file of the kernel says; nothing if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
