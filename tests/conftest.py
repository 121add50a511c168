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
from typing import Any

# Before torch is imported: two shared cores are slower with more threads, and sums in parallel have no fixed order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No pool of processes to compile in, which would outlive the test that started it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Nothing is downloaded: models are built from configurations.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from . import selection
from .access_check import steps_checked
from .order_check import order_checked
from .selection import is_plain, left_out, mark, thin_out

torch.set_num_threads(1)

# No deadline: on a shared machine a slow example says nothing. CI draws the same examples each time.
settings.register_profile(
    "sp_lightning", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sp_lightning")

# Variables that Lightning, torch or pytest leave by design.
ALLOWED_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}


# Their tests share something that takes long to make: a bench, a process with imports, a device, kernels.
FOR_ONE_PROCESS = (
    "tests/test_benchmarks.py", "tests/test_registration.py", "tests/test_loading.py", "tests/test_second_device.py",
    "tests/optim",
)  # fmt: skip
WITH_FORK_SERVER = (
    "tests/test_processes.py", "tests/test_fabric_processes.py", "tests/test_one_copy.py",
    "tests/pipeline/gradients/test_processes.py", "tests/pipeline/weights/test_buffers.py",
)  # fmt: skip


# Copies, jobs and computing overlap in their tests; see order_check.py.
WITH_CHECKED_ORDER = (
    "tests/pipeline/gradients", "tests/pipeline/optimizer", "tests/pipeline/window/test_copies_under_way.py",
    "tests/planning/test_exact.py", "tests/test_activations.py", "tests/test_crossings.py",
    "tests/test_exact_offload.py", "tests/test_exact_random_graphs.py", "tests/test_exact_random_trainers.py",
    "tests/test_overlap.py", "tests/test_several_models.py", "tests/test_writes.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes each gets one piece of work after the other, in order."""
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for place in FOR_ONE_PROCESS:
                if nodeid.startswith(place):
                    return place
            if nodeid.startswith(WITH_FORK_SERVER):
                return "processes"
            test, _, parameters = nodeid.partition("[")
            return f"{test}[{parameters.partition('-')[0]}"  # often a model, whose plain training is not repeated

    config.option.loadscopereorder = False
    return InOrder(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """More processes than cores: tests wait for copies that are delayed on purpose, and for other processes."""
    return (os.cpu_count() or 1) * 3 // 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a plain run leaves out is in selection.py."""
    parser.addoption("--all", action="store_true", help="run the tests that take long, too")
    parser.addoption("--all-lags", action="store_true", help="run each test of tests/gpu with everything that may lag")


def pytest_configure(config: pytest.Config) -> None:
    """Decide how many programs are drawn, before test files are imported; end the run if a worker dies."""
    selection.is_short = selection.is_plain_run(config)
    if getattr(config.option, "maxworkerrestart", "") is None:  # that of xdist
        config.option.maxworkerrestart = "0"


def pytest_report_header(config: pytest.Config) -> str:
    """What a reader of the summary has to know."""
    everything = config.getoption("all") or config.getoption("markexpr")
    return "" if everything else "tests that take long: only where their file is named; `pytest --all` runs them, too"


@pytest.hookimpl(tryfirst=True)  # the marks come before `-m` looks at them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, the longest before all, so that of several processes none is left alone at the end."""
    for item in items:
        mark(item)
    thin_out(items)
    if left := set(left_out(config, items)):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: (is_plain(item), item.path.name != "test_second_device.py"))
    # What was imported stays: looking through all of it takes half a second each time that a test collects garbage.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or libraries complain about leaks when the process ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator, this machine has none")


@pytest.fixture(autouse=True, scope="session")
def check_steps() -> Iterator[None]:
    """Steps of pipelines with `debug=True` are checked, in this process."""
    with steps_checked():
        yield


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
    from sp_lightning.optim.passes import compiled_kernels

    for name in ("numba", "sp_lightning.optim.kernels", "sp_lightning.optim.codecs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if request.param == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        (tmp_path / "numba.py").write_text("raise SystemError('Numba needs NumPy 2.3 or less')")
        monkeypatch.syspath_prepend(tmp_path)
    for cached in (compiled_kernels, has_torchs_bits):
        cached.cache_clear()
    yield
    for cached in (compiled_kernels, has_torchs_bits):
        cached.cache_clear()
