"""What needs an accelerator runs on a second device, which is made here (see second_device)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from .helpers import assert_close_trace, assert_same_trace
from .processes import Fork, forks
from .second_device.build import build, why_not

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of a process in which CUDA is the second device."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    before_torch, kernels = build()
    return {
        **os.environ,
        "SECOND_DEVICE": str(kernels),
        "LD_PRELOAD": ":".join(map(str, before_torch)),
        "CUDA_VISIBLE_DEVICES": "0",  # as many as the runtime says there are, whatever the machine has
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fork(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    """Runs code in a process that is forked from one with all imports."""
    with forks("import torch, tests, sp_lightning.pipeline", tmp_path_factory.mktemp("forks"), environment) as fork:
        yield fork


FILES = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
HALF = {
    "test_compile_on_device.py", "test_exact_on_device.py", "test_memory_limits.py", "test_plans_that_fit.py",
    "test_units_on_device.py",
}  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [HALF, FILES - HALF], ids=["half", "the other half"])
def test_what_needs_an_accelerator(
    files: set[str], environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """On torch's own code for CUDA: streams and events, page-locked memory, an allocator that runs out."""
    # a thread ends and names a test that hangs: a signal would not be heard by one that waits within CUDA
    command = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout-method=thread"]
    command += [f"tests/gpu/{name}" for name in sorted(files)]
    command.append("--nightly" if request.config.getoption("nightly") else "--all")
    ended = run(environment, "-m", *command)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) > 30


UNORDERED = """
import torch
from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend

{breaking}
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
pipe = Pipeline(model, torch.device("cuda", 0), options=PipelineOptions(k=2, k_prime=1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    with pipe.step():
        pipe.module(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
pipe.detach()
"""


@pytest.mark.parametrize(
    "breaking",
    [
        "",
        "AcceleratorBackend.wait = lambda self, ticket: None",  # computing does not wait for a copy to the device
        "AcceleratorBackend.upload = lambda self, to, frm, after=None: self._copy(self._up, to, frm)",  # nor it
        "AcceleratorBackend.download = lambda self, to, frm: self._copy(self._down, to, frm)",  # nor one to the host
    ],
    ids=["nothing", "wait", "upload", "download"],
)
def test_a_race_is_seen(breaking: str, fork: Fork) -> None:
    """Each order that the engine keeps on the device is needed, and its absence does not go unseen."""
    status, _, said = fork(UNORDERED.format(breaking=breaking))
    assert ("RACE" in said) == bool(breaking), said[-2_000:]
    assert (status != 0) == bool(breaking)


CONFIGURED = """
import torch
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend

torch.cuda.init()
AcceleratorBackend(torch.device("cuda", 0)).close()
print(torch.ones(1 << 23, device="cuda").sum().item() == 1 << 23)
print(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])
"""


@pytest.mark.parametrize(
    ("setting", "configured"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"SECOND_DEVICE_MAPS": "0"}, "expandable_segments:False"),
    ],
    ids=["nothing", "by the user", "without support"],
)
def test_how_memory_is_allocated(setting: dict[str, str], configured: str, fork: Fork) -> None:
    """Free memory is mapped to where it is needed, if the device can do that and the user has asked for nothing."""
    _, printed, said = fork(CONFIGURED, **setting)
    assert printed.split() == ["True", configured], said[-2_000:]


ELSEWHERE = """
import torch
import tests
from sp_lightning.pipeline import Pipeline, PipelineOptions

asked_on = set()


def noting(ask):
    def noted(event):
        asked_on.add(torch.cuda.current_device())
        return ask(event)

    return noted


event = torch.cuda.Event
event.query, event.synchronize = noting(event.query), noting(event.synchronize)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
pipe = Pipeline(model, "cuda:1", options=PipelineOptions(k=2, k_prime=1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with pipe.record(), pipe.step():
        model(torch.ones(8, 64, device="cuda:1")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model[0].weight.sum()
pipe.detach()
print(asked_on, torch.cuda.memory_reserved(0))
"""


def test_a_device_that_is_not_the_current_one(environment: dict[str, str]) -> None:
    """Nothing is asked of the current device, where that would make a context."""
    there = {"PYTHONPATH": str(ROOT), "SECOND_DEVICE_COUNT": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    ended = run({**environment, **there}, "-c", ELSEWHERE)
    assert ended.returncode == 0, ended.stderr[-5_000:]
    assert ended.stdout.strip() == "{1} 0"


def test_two_devices_do_what_one_does(environment: dict[str, str], tmp_path: Path) -> None:
    """Each process has a device of its own; gradients are averaged as one device adds up those of two batches."""
    weights = []
    for devices in ("1", "2"):
        path = tmp_path / f"{devices}.pt"
        here = {"PYTHONPATH": str(ROOT), "SECOND_DEVICE_COUNT": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
        script = ROOT / "tests" / "second_device" / "two_devices.py"
        ended = run({**environment, **here}, str(script), devices, str(path))
        assert ended.returncode == 0, ended.stderr[-5_000:]
        weights.append(torch.load(path))
    assert len(weights[0]) > 40
    assert_same_trace(*weights)


@pytest.mark.skipif(find_spec("trl") is None, reason="the Trainers need it: pip install -e '.[trl]'")
def test_two_devices_under_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    """With Hugging Face's Trainer, two devices do what its DDP does on the CPU, whose attention rounds otherwise."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "tests/second_device/two_trainers.py")]
    there = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    on_devices = {**environment, **there, "SECOND_DEVICE_COUNT": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    weights = []
    for name, variables in {"devices": on_devices, "cpu": {**os.environ, **there, "CUDA_VISIBLE_DEVICES": ""}}.items():
        ended = run(variables, *launch, str(tmp_path / name))
        assert ended.returncode == 0, ended.stderr[-5_000:]
        weights.append(torch.load(tmp_path / name / "weights.pt"))
    assert len(weights[0]) > 20
    assert_close_trace(*weights)
