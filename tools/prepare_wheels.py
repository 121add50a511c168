"""Collect the wheels that a GPU machine with Python 3.12 and no package registry lacks for the benchmark and the tests.

    python tools/prepare_wheels.py          # here, into tools/wheels, which git ignores

The machine has torch, torchvision, pytorch-lightning, transformers and accelerate, so neither these nor their
dependencies are collected. The rest (rivals, `lightning`, pytest and its plugins) is small, so all of it is taken
along, needed or not. `on_a_gpu.md`, in this folder, explains how it is installed there without changing what the
machine has. DeepSpeed is distributed only as source; its wheel is built here, without kernels. TrainStream's has
sources, which it compiles when it is first imported, with the machine's nvcc.
"""

from __future__ import annotations

import argparse
import os
import subprocess  # runs pip, with arguments from this file
import sys
from pathlib import Path

ALONE = ["torchao==0.18.0", "diffusers==0.42.1", "lightning==2.6.6", "trainstream==0.4.1"]
"""Collected without dependencies; those that the machine lacks are listed below."""
BUILT = ["deepspeed==0.19.8"]
IMPORTED = ["einops", "hjson", "importlib-metadata", "msgpack", "ninja", "py-cpuinfo", "pydantic", "requests"]
"""What the rivals import and the machine lacks; collected with dependencies."""
TESTS = ["hypothesis", "jsonargparse[signatures,ruamel]", "pytest", "pytest-timeout", "pytest-xdist"]
"""What the tests import, and what pyproject.toml requires of pytest; collected with dependencies."""
MACHINE = [
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.12",
    *(f"--platform={tag}_x86_64" for tag in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")),
]
LIMIT = 64 * 2**20  # the most that can be carried to the machine


def pip(*arguments: str) -> None:
    """Run pip."""
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environment)  # noqa: S603


def collect(folder: Path) -> list[Path]:
    """Replace the wheels in a folder by new ones, because pip installs none if there are two versions of one.

    Returns:
        The wheels.
    """
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    pip("download", "--quiet", f"--dest={folder}", *MACHINE, "--no-deps", *ALONE)
    pip("download", "--quiet", f"--dest={folder}", *MACHINE, *IMPORTED, *TESTS)
    pip("wheel", "--quiet", f"--wheel-dir={folder}", "--no-deps", *BUILT)
    return sorted(folder.glob("*.whl"))


def main() -> None:
    """Collect the wheels, and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "wheels", help="where to put them")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {wheel.name: wheel.stat().st_size for wheel in collect(folder)}
    for name, size in sizes.items():
        print(f"{size / 2**20:7.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / 2**20:7.2f} MiB in all")
    if total > LIMIT:
        sys.exit(f"{folder} is larger than the {LIMIT / 2**20:.0f} MiB that can be carried.")


if __name__ == "__main__":
    main()
