"""What needs an accelerator runs on a second device, which is made here (see second_device)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .second_device.build import build, why_not

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_needs_an_accelerator(tmp_path: Path) -> None:
    """With tensors of another type, a thread of autograd's, and memory that runs out; only CUDA's own is left out."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    device, accelerator = build(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        env={
            **os.environ,
            "SECOND_DEVICE": str(device),
            "LD_PRELOAD": str(accelerator),
            "CUDA_VISIBLE_DEVICES": "",  # a GPU that is there has its own run of these tests
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) > 80
