"""How much memory the host has: the machine's, or that of a control group that may use less."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_lightning.pipeline import host_memory
from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory

KIB = 1024
MEMINFO = "MemTotal:        1000 kB\nMemFree:          300 kB\nMemAvailable:     800 kB\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a file system, with a machine of 1000 KiB, of which 800 are free."""
    monkeypatch.setattr(host_memory, "_PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limit(folder: Path, most: str | int, used: int, cache: int) -> None:
    """Make a control group."""
    write(folder / "memory.max", most)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 12345\nactive_file 6789\ninactive_file {cache}\n")


def known() -> tuple[int | None, int | None]:
    return available_host_memory(), total_host_memory()


def test_without_a_limit_memory_is_that_of_the_machine(system: Path) -> None:
    assert known() == (800 * KIB, 1000 * KIB)
    write(system / "proc/self/cgroup", "0::/user.slice")
    limit(system / "cgroup/user.slice", "max", used=100 * KIB, cache=0)
    assert known() == (800 * KIB, 1000 * KIB)


def test_a_system_that_does_not_tell(system: Path) -> None:
    """Not every one has /proc/meminfo."""
    (system / "proc/meminfo").unlink()
    limit(system / "cgroup", 400 * KIB, used=0, cache=0)
    assert known() == (None, None)


@pytest.mark.parametrize(
    ("path", "most", "used", "cache", "free", "total"),
    [
        ("/", 400, 300, 50, 150, 400),
        ("/kubepods/pod12/abc", 400, 300, 0, 100, 400),
        ("/", 9000, 10, 0, 800, 1000),
        ("/", 100, 300, 0, 0, 100),
    ],
    ids=[
        "file caches are given up",
        "the path on its machine",
        "more than the machine has",
        "lowered below what is used",
    ],
)
def test_the_limit_of_a_container(
    path: str, most: int, used: int, cache: int, free: int, total: int, system: Path
) -> None:
    """It sees its own group as the root of all."""
    write(system / "proc/self/cgroup", f"0::{path}")
    limit(system / "cgroup", most * KIB, used=used * KIB, cache=cache * KIB)
    assert known() == (free * KIB, total * KIB)


def test_groups_lie_in_groups(system: Path) -> None:
    """A job may have more left than its user."""
    write(system / "proc/self/cgroup", "0::/user/job")
    limit(system / "cgroup/user/job", 500 * KIB, used=100 * KIB, cache=0)
    limit(system / "cgroup/user", 600 * KIB, used=550 * KIB, cache=0)
    assert known() == (50 * KIB, 500 * KIB)


def test_a_limit_of_version_1(system: Path) -> None:
    """Each controller has a tree; a group without a limit says a number above all memory."""
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/slurm\n4:memory:/slurm/job\n0::/")
    for folder, most in {"slurm/job": 500 * KIB, "slurm": 2**63 - 4096}.items():
        write(system / "cgroup/memory" / folder / "memory.limit_in_bytes", most)
        write(system / "cgroup/memory" / folder / "memory.usage_in_bytes", 300 * KIB)
    assert known() == (200 * KIB, 500 * KIB)
