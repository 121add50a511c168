"""What every test gets: one thread, one seed, an empty folder, and a check that it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from .access_check import steps_checked
from .order_check import order_checked
from .processes import new_process

torch.set_num_threads(1)

# Variables that Lightning, torch or pytest leave by design.
ALLOWED_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}  # fmt: skip

# Copies, jobs and computing overlap in their tests; see order_check.py.
WITH_CHECKED_ORDER = (
    "tests/pipeline/gradients", "tests/pipeline/optimizer", "tests/pipeline/window/test_copies_under_way.py",
    "tests/planning/test_exact.py", "tests/test_activations.py", "tests/test_crossings.py",
    "tests/test_exact_offload.py", "tests/test_exact_random_graphs.py", "tests/test_exact_random_trainers.py",
    "tests/test_overlap.py", "tests/test_several_models.py", "tests/test_writes.py",
)  # fmt: skip


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator, this machine has none")


@pytest.fixture(autouse=True, scope="session")
def check_steps() -> Iterator[None]:
    """Steps of pipelines with `debug=True` are checked, in this process."""
    with steps_checked():
        yield


@pytest.fixture(scope="session")
def server() -> None:
    """A process with imports, from which those of tests are forked; times.json counts it for each of these tests."""
    new_process(gc.collect).join()


@pytest.fixture(autouse=True)
def check_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which the engine leaves out a wait, in the files whose tests have much under way."""
    with order_checked() if request.node.nodeid.startswith(WITH_CHECKED_ORDER) else nullcontext():
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for each test, whichever ran before."""
    random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # it would note the whole stack for each kind of device that is not in use
        torch.default_generator.manual_seed(0)


@pytest.fixture
def default_device_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `torch.set_default_device(None)`: torch 2.9 cannot tell which it is then, which ends with the test."""
    monkeypatch.setattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None, raising=False)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in a folder of the test's own: what it writes beside itself does not land in the repository.

    Not by `monkeypatch`: a fixture that asks for it here would keep the test's own patches alive
    until after the checks below.
    """
    before = os.getcwd()
    os.chdir(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))  # `mktemp` looks through those of all tests before
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_new_variables() -> Iterator[None]:
    """Fail a test that changes the environment, and restore it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    left = sorted(changed - ALLOWED_VARIABLES)
    assert not left, f"the test changed environment variables: {left}"


def collect_until(freed: Callable[[], bool], seconds: float = 20) -> None:
    """Collect garbage until what a test made is freed, or it takes too long.

    Again and again: what a thread held a moment ago, as autograd's holds the last backward, may be left to a cycle.
    """
    end = time.monotonic() + seconds
    while not freed() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def weights_are_seen() -> Iterator[None]:
    """Fail a test that leaves `__torch_function__` switched off in this thread: no guard would see a weight."""
    yield
    assert torch._C._is_torch_function_enabled()


@pytest.fixture(autouse=True)
def no_new_threads() -> Iterator[None]:
    """Fail a test that leaves threads running."""
    before = set(threading.enumerate())
    yield

    def leaked() -> list[str]:
        # A dummy is Python's view of a thread of C++, such as autograd's for a device: torch keeps those, and those
        # that talk to the processes in which inductor compiles kernels for a device.
        return [
            thread.name
            for thread in set(threading.enumerate()) - before
            if not isinstance(thread, threading._DummyThread)
            and thread.name != "tqdm_monitor"
            and "subproc" not in thread.name.lower()
        ]

    collect_until(lambda: not leaked())  # some threads end with the object that owns them
    assert not leaked(), f"the test left threads running: {leaked()}"


@pytest.fixture(autouse=True)
def no_new_device_memory() -> Iterator[None]:
    """Fail a test that leaves tensors on the device."""
    if not torch.accelerator.is_available():
        yield
        return
    before = _device_bytes()
    yield
    collect_until(lambda: _device_bytes() <= before)
    left = _device_bytes() - before
    assert left <= 0, f"the test left {left} bytes on the device"


def _device_bytes() -> int:
    api = torch.get_device_module(torch.accelerator.current_accelerator())
    api.synchronize()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps these for the next matrix product
    return api.memory_allocated()


@pytest.fixture(params=["missing", "broken"])
def without_numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A Python without numba, or with one that refuses the installed numpy as it is imported."""
    from sp_lightning.optim.of_torch import has_torchs_bits
    from sp_lightning.optim.passes import _warn_that_torch_updates, compiled_kernels, loop_of

    all_cached = (compiled_kernels, loop_of, _warn_that_torch_updates, has_torchs_bits)
    for name in ("numba", "sp_lightning.optim.kernels", "sp_lightning.optim.codecs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if request.param == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        (tmp_path / "numba.py").write_text("raise SystemError('Numba needs NumPy 2.3 or less')")
        monkeypatch.syspath_prepend(tmp_path)
    for cached in all_cached:
        cached.cache_clear()
    yield
    for cached in all_cached:
        cached.cache_clear()
