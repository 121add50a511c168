"""What tests on a device get: the device, kernels that give the same bits every time, and something that lags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from zlib import crc32

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..second_device import IN_USE
from .unkind import LAGS, pageable_copies

# What deterministic matrix products need. torch looks once, at the first product on a device, whoever multiplies: a
# fixture would come too late if another test multiplied before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test becomes four, by an option."""
    if metafunc.config.getoption("nightly"):
        metafunc.parametrize("lag", LAGS, indirect=True)


@pytest.fixture(autouse=True)
def lag(request: pytest.FixtureRequest) -> Iterator[str]:
    """What lags while the test runs, on the device that is made for tests: one thing, by the test's name."""
    name = getattr(request, "param", None)
    if name is None:
        name = sorted(LAGS)[crc32(request.node.nodeid.encode()) % len(LAGS)] if IN_USE else "nothing"
    with LAGS[name]():
        yield name


@pytest.fixture(autouse=True)
def page_locked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which the engine has copied memory that is not page-locked, unless that is what it asks for."""
    pins = "pin" not in request.fixturenames or request.getfixturevalue("pin")
    if not (IN_USE and pins):
        yield
        return
    with pageable_copies() as found:
        yield
    assert not found, "copies of memory that is not page-locked, by\n" + "\n".join(sorted(found))


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
