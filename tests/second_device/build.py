"""Compiles the device: three libraries, which are kept for other runs in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = Path(__file__).parent
_COMPILER = shutil.which("g++") or shutil.which("c++")


def why_not() -> str | None:
    """What is missing to compile it, if anything is."""
    if sys.platform != "linux":
        return "the device is written for Linux"
    if _COMPILER is None:
        return "there is no C++ compiler"
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not _cuda_headers():
        return "there are no headers of CUDA, which come with the torch of PyPI"
    return None


def build() -> tuple[list[Path], Path]:
    """Compile it, which takes half a minute, unless these sources were compiled for this torch before.

    Returns:
        The libraries to load before torch, and the one with the kernels, for `torch.ops.load_library`.
    """
    sources = [path.read_bytes() for path in sorted(SOURCES.rglob("*")) if path.suffix in (".cpp", ".h", ".py")]
    name = hashlib.sha256(b"".join([torch.__version__.encode(), *sources])).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sp_lightning" / f"device-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.mkdtemp())
    runtime, management, kernels = folder / "runtime.so", folder / "management.so", folder / "kernels.so"
    with (folder / "lock").open("w") as lock:  # of two processes one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _compile(runtime, management, kernels)
            (folder / "done").touch()
    return [runtime, management], kernels


def _compile(runtime: Path, management: Path, kernels: Path) -> None:
    assert _COMPILER is not None
    general = [_COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{SOURCES / 'include'}"]
    general += [f"-I{path}" for path in _cuda_headers()]
    # torch opens the driver's libraries by their names, and finds those that are there
    command_for_runtime = [*general, "-Wl,-soname,libcuda.so.1", SOURCES / "runtime.cpp", "-o", runtime, "-lpthread"]
    command_for_management = [*general, "-Wl,-soname,libnvidia-ml.so.1", SOURCES / "management.cpp", "-o", management]
    torch_flags = [f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"]  # 0 up to torch 2.6
    torch_flags += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    libraries = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")]
    command_for_kernels = [*general, SOURCES / "kernels.cpp", "-o", kernels, *torch_flags, *libraries]
    for command in (command_for_runtime, command_for_management, command_for_kernels):
        subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)


def _cuda_headers() -> list[Path]:
    """Where the packages that torch depends on have them."""
    packages = find_spec("nvidia")
    if packages is None:
        return []
    folders = [Path(place) for place in packages.submodule_search_locations or ()]
    return [path for folder in folders for path in sorted(folder.glob("*/include"))]
