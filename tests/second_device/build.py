"""Compiles the device: three libraries, in a folder of the caller's."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


def build(folder: Path) -> tuple[list[Path], Path]:
    """Compile it, which takes about half a minute.

    Returns:
        The libraries to load before torch, and the one with the kernels, for `torch.ops.load_library`.
    """
    runtime, management, kernels = folder / "runtime.so", folder / "management.so", folder / "kernels.so"
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
    return [runtime, management], kernels


def _cuda_headers() -> list[Path]:
    """Where the packages that torch depends on have them."""
    packages = find_spec("nvidia")
    if packages is None:
        return []
    folders = [Path(place) for place in packages.submodule_search_locations or ()]
    return [path for folder in folders for path in sorted(folder.glob("*/include"))]
