"""A description of the machine and the software, without which a number means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from suite import host_memory

_PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "torchvision",
    "deepspeed",
    "trainstream",
    "torchao",
    "accelerate",
    "diffusers",
)
_HERE = Path(__file__).resolve().parent


def describe(revision: str | None = None) -> dict[str, Any]:
    """Describe GPU, driver, versions, git revision, host memory and cores.

    Args:
        revision: The commit, in case git is not available.
    """
    return {
        **_gpu(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        **host(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "cuda": torch.version.cuda,
        **_revision(revision),
    }


def host() -> dict[str, int]:
    """Return total and free host memory, which may grow."""
    return {"host_bytes": host_memory.total_bytes(), "host_free_bytes": host_memory.free_bytes()}


def _gpu() -> dict[str, Any]:
    """Describe the GPU, if there is one. This asks nvidia-smi, so that this process holds no device memory."""
    asked = _run("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")
    if not asked:
        return {"gpu": None, "driver": None, "device_bytes": None}
    name, driver, mebibytes = (part.strip() for part in asked.splitlines()[0].split(","))
    return {"gpu": name, "driver": driver, "device_bytes": int(mebibytes) * 2**20}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision(given: str | None) -> dict[str, Any]:
    """Return the commit, and whether files differ from it, which is unknown without git or a repository."""
    commit = _run("git", "-C", str(_HERE), "rev-parse", "HEAD")
    if commit is None:
        return {"revision": given, "modified": None}
    return {"revision": commit, "modified": bool(_run("git", "-C", str(_HERE), "status", "--porcelain"))}


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
