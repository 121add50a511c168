"""Compiles the device: two libraries, in a folder of the caller's."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
    if torch.__version__ < "2.9":
        return "the device is written for the C++ interfaces of torch 2.9 and newer"
    return None


def build(folder: Path) -> tuple[Path, Path]:
    """Compile it, which takes about half a minute.

    Returns:
        The library of the device, for `torch.ops.load_library`, and the one to load before torch.
    """
    device, accelerator = folder / "device.so", folder / "accelerator.so"
    assert _COMPILER is not None
    general = [_COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared"]
    headers = [f"-I{path}" for path in include_paths()]
    libraries = [f"-L{path}" for path in library_paths()]
    for command in (
        [*general, SOURCES / "accelerator.cpp", "-o", accelerator],
        [*general, *headers, SOURCES / "device.cpp", "-o", device, *libraries, "-ltorch", "-ltorch_cpu", "-lc10"],
    ):
        subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    return device, accelerator
