"""The bench runs, whole and at toy size, and says what it measured: processes, records, limits, tables, pictures."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from suite.sets import SETS, WORKLOADS
from suite.weights import build_network
from suite.worker import Job, measure

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "examples" / "benchmarks"
STEPS, WARM_UP = 3, 1
WHOLE = ["toy-lm", "toy-batch"]  # measured as the command does it; the others in this process
OF_OTHER_PRECISION = ["toy-lm-mixed", "toy-lm-noclip"]  # with the networks of others
OURS = ["device", "superpipeline"]  # the other systems have tests of their own, see test_benchmark_systems.py
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def call(*arguments: object, code: int = 0) -> str:
    command, nothing = [sys.executable, *map(str, arguments)], subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, stdin=nothing)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Any]:
    """Some workloads as the command measures them: once for all of pytest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # what the workers share
    output = folder / "toy.json"
    small = ["--rounds=1", f"--steps={STEPS}", f"--warm-up={WARM_UP}", "--time-limit=500"]
    with open(folder / "toy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            which = ["--workloads", *WHOLE, "--systems", *OURS]
            call(BENCHMARKS / "bench.py", "run", *which, *small, f"--output={folder / 'coming.json'}")
            (folder / "coming.json").rename(output)
    return json.loads(output.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------- the whole bench


def test_a_run_writes_what_it_measured(toy):
    assert toy["complete"]
    assert {run["workload"] for run in toy["runs"]} == set(WHOLE)
    assert {run["status"] for run in toy["runs"]} == {"ok"}, [run["error"] for run in toy["runs"]]
    assert {tuple(run["window"]) for run in toy["runs"] if run["window"]} == {(1, 1), (4, 2)}
    assert {run["budget"] for run in toy["runs"] if run["system"] == "superpipeline"} == {None, 250_000, 500_000}
    assert [run["samples"] for run in toy["runs"] if run["workload"] == "toy-batch"] == [2, 2, 4, 4]
    for run in toy["runs"]:
        assert len(run["step_seconds"]) == STEPS
        assert min(run["step_seconds"]) > 0
        assert run["host_peak_bytes"] > 10**8
        assert run["limit"]["seconds"] == max(run["limit"]["lanes"].values()) > 0


@pytest.mark.parametrize("name", sorted({workload.name for workload in SETS["toy"]} - {*WHOLE, *OF_OTHER_PRECISION}))
def test_systems_compute_the_same(name):
    plain, ours = (
        measure(Job(name, system, None, WORKLOADS[name].samples, 0, WARM_UP, STEPS))["values"] for system in OURS
    )
    assert ours[: len(plain)] == pytest.approx(plain[: len(ours)], rel=1e-5)  # one of them warms up for longer


def test_a_report_needs_nothing_but_the_file(toy, tmp_path, capsys):
    """Systems and workloads that nobody has heard of are rendered as well; who computes something else is marked."""
    text = json.dumps(toy).replace("toy-", "unheard-of-").replace('"superpipeline"', '"of another planet"')
    results = json.loads(text)
    for run in results["runs"]:
        if run["workload"] == "unheard-of-lm" and run["system"] == "of another planet":
            run["values"] = [1.2 * value for value in run["values"]]
    (tmp_path / "x.json").write_text(json.dumps(results), encoding="utf-8")
    bench.main(["render", str(tmp_path / "x.json"), "--plots", str(tmp_path / "plots")])
    printed = capsys.readouterr().out
    differing = [line for line in printed.splitlines() if "**differs**" in line]
    assert differing
    assert all("of another planet" in line for line in differing)
    assert "**differs**" not in printed.partition("## unheard-of-batch\n")[2].partition("\n## ")[0]
    for name in [workload.replace("toy-", "unheard-of-") for workload in WHOLE]:
        assert f"## {name}\n" in printed
        assert (tmp_path / "plots" / f"{name}.svg").exists()
    assert printed.count("of another planet (x 4)") == len(WHOLE)
    assert "k=4, k'=2" in (tmp_path / "plots" / "unheard-of-lm.svg").read_text(encoding="utf-8").replace("&#x27;", "'")
    assert (tmp_path / "plots" / "unheard-of-lm-k.svg").exists()
    assert (tmp_path / "plots" / "unheard-of-lm-over-memory.svg").exists()
    assert "no GPU" in printed
    assert "not measured" in printed


# ---------------------------------------------------------------------------------------------------------- its parts


@pytest.mark.parametrize("name", ["toy-lm", "toy-lora", "toy-resnet"])
def test_a_network_is_built_without_drawing_its_weights(name):
    """To draw those of 8B would take minutes."""
    before = torch.get_rng_state()
    build_network(WORKLOADS[name])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a --set or --workloads"),
        (["--set", "nowhere"], "invalid choice: 'nowhere'"),
        (["--set", "toy", "--steps=0"], "0 is not an integer of at least 1"),
        (["--set", "toy", "--host-memory=much"], "'much' is not an amount of memory such as '120GB'"),
    ],
)
def test_the_command_refuses_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(["run", "--output=x.json", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
