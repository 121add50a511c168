"""How tests run: which of them, in which order and processes; every_test.py has what each of them gets."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
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
from hypothesis import HealthCheck, settings

from . import selection
from .times import Times

# No deadline: on a shared machine a slow example says nothing. CI draws the same examples each time.
settings.register_profile(
    "sp_lightning", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sp_lightning")

# Their tests share something that takes long to make: a bench, a process with imports, a device, kernels.
FOR_ONE_PROCESS = (
    "tests/test_benchmarks.py", "tests/test_registration.py", "tests/test_loading.py", "tests/test_second_device.py",
    "tests/optim",
)  # fmt: skip
WITH_FORK_SERVER = (
    "tests/test_processes.py", "tests/test_fabric_processes.py", "tests/test_one_copy.py",
    "tests/pipeline/gradients/test_processes.py", "tests/pipeline/weights/test_buffers.py",
    "tests/test_fp8.py::test_two",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes each gets one piece of work after the other, in order."""
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "::test_what_needs_an_accelerator" in nodeid:
                return nodeid
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
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as cores: each imports and collects for itself, which takes a dozen seconds.

    Of all tests, many wait for other processes, and for copies that are delayed on purpose: then half as many more.
    """
    selection.set_run(config)
    cores = os.cpu_count() or 1
    return cores if selection.is_plain_run else cores * 3 // 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """See selection.py."""
    parser.addoption("--all", action="store_true", help="run the tests that take long, too")
    parser.addoption(
        "--nightly", action="store_true", help="run all tests, with all random programs and all that may lag"
    )
    parser.addoption("--write-times", action="store_true", help="write CPU seconds of the tests that run to times.json")
    parser.addoption("--budget", type=float, help="fail if the tests of a plain run take more CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Note what was asked for, before test files are imported; end the run if a worker dies."""
    selection.set_run(config)
    config.pluginmanager.register(Times(config), "times")
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":  # or it runs no tests itself
        config.pluginmanager.import_plugin("tests.every_test")
    if getattr(config.option, "maxworkerrestart", "") is None:  # that of xdist
        config.option.maxworkerrestart = "0"


def pytest_report_header() -> str:
    """What a reader of the summary has to know."""
    return "quick tests only: `pytest --all` runs the others, too" if selection.is_plain_run else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: Python would look through all of it again and again, for seconds."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    """Or libraries complain about leaks when the process ends."""
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A plain run imports no file of which it runs no test, and none for a device that is not there."""
    if not (selection.is_plain_run and collection_path.name.startswith("test_")):
        return None
    if collection_path.parent.name == "gpu":
        import torch

        return not torch.accelerator.is_available() or None
    return not selection.has_plain_tests(collection_path) or None


@pytest.hookimpl(tryfirst=True)  # before `-k` and `-m` take some away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what was asked for; the longest files first, so that of several processes none is left alone at the end."""
    selection.note_cases(items)
    if left := set(selection.left_out(config, items)):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if not selection.is_plain_run:
        items.sort(key=lambda item: -selection.seconds_of_file(item.path))
