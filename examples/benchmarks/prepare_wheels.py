"""Collects the rivals' packages as wheels, for a GPU machine with Python 3.12 that has no registry.

    python examples/benchmarks/prepare_wheels.py          # here, into examples/benchmarks/wheels, which git ignores

    pip install --no-index --no-deps examples/benchmarks/wheels/*.whl                                    # and there
    python -c "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder; CPUAdamBuilder().load()"

The machine has torch, torchvision, lightning, transformers and accelerate: neither these nor what they bring are
collected. DeepSpeed is given out as source only; its wheel is built here without kernels. The second line there
compiles the one that is used (with g++ and ninja), so that no measurement begins with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess  # it runs pip, with arguments from this file
import sys
from pathlib import Path

RIVALS = ["torchao==0.18.0", "diffusers==0.42.1"]
BUILT = ["deepspeed==0.19.8"]
IMPORTED = ["einops", "hjson", "importlib-metadata", "msgpack", "ninja", "py-cpuinfo", "pydantic", "requests"]
"""What the rivals import beside what the machine has; these bring what they need themselves."""
MACHINE = [
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.12",
    *(f"--platform={tag}_x86_64" for tag in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")),
]
LIMIT = 64 * 2**20  # what may be carried to the machine


def pip(*arguments: str) -> None:
    """Run pip."""
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environment)  # noqa: S603


def collect(folder: Path) -> list[Path]:
    """Put the wheels into a folder, which ought to be empty.

    Returns:
        The wheels.
    """
    pip("download", "--quiet", f"--dest={folder}", *MACHINE, "--no-deps", *RIVALS)
    pip("download", "--quiet", f"--dest={folder}", *MACHINE, *IMPORTED)
    pip("wheel", "--quiet", f"--wheel-dir={folder}", "--no-deps", *BUILT)
    return sorted(folder.glob("*.whl"))


def main() -> None:
    """Collect, and say what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "wheels", help="where to")
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
