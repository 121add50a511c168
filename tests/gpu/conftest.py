"""What tests on a real device get: the device, and kernels that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# What deterministic matrix products need. torch looks once, at the first product on a device, whoever multiplies: a
# fixture would come too late if another test multiplied before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def device() -> torch.device:
    """The accelerator of this machine."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@pytest.fixture
def accelerator(device: torch.device) -> str:
    """What Lightning's Trainer calls it."""
    return "gpu" if device.type == "cuda" else device.type


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The accelerator, for tests that ask CUDA's own tools."""
    if device.type != "cuda":
        pytest.skip(f"needs CUDA, this machine has {device.type}")
    return device


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic kernels, and the one attention kernel that is deterministic everywhere."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(before)
