"""The bench runs, whole and at toy size, and says what it measured: processes, records, limits, tables, pictures."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from suite import rooflines, runner
from suite.demand import demand_of, describe
from suite.networks import Network
from suite.report import report
from suite.results import entries
from suite.sets import SETS, WORKLOADS
from suite.systems import SYSTEMS
from suite.targets import targets
from suite.weights import build_network
from suite.worker import Job, failure, record
from suite.workloads import Workload
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "examples" / "benchmarks"
STEPS, WARM_UP = 3, 1
OF_OURS = {"superpipeline-recompute", "superpipeline-least"}  # these train, and do not predict
OURS = {"device", "superpipeline"}  # the other systems have tests of their own, see test_benchmark_systems.py
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TIMEOUT = 550.0  # for a machine that is busy with other tests


def whole_bench(test: Any) -> Any:
    """Mark a test that starts processes."""
    return pytest.mark.slow(pytest.mark.timeout(TIMEOUT + 30)(test))


def call(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Any]:
    """Every kind of workload, on every system that works here, as the command measures it: once for all of pytest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # what the workers share
    output = folder / "toy.json"
    small = ["--rounds=1", f"--steps={STEPS}", f"--warm-up={WARM_UP}", f"--time-limit={TIMEOUT - 50}"]
    with open(folder / "toy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            call(BENCHMARKS / "bench.py", "run", "--set", "toy", *small, f"--output={folder / 'coming.json'}")
            (folder / "coming.json").rename(output)
    return json.loads(output.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------- the whole bench


@whole_bench
def test_every_kind_of_workload_runs_here(toy):
    assert toy["complete"]
    assert {run["workload"] for run in toy["runs"]} == {workload.name for workload in SETS["toy"]}
    assert {run["system"] for run in toy["runs"]} == set(SYSTEMS)
    ran = [run for run in toy["runs"] if run["system"] in OURS]
    assert {run["status"] for run in ran} == {"ok"}, [run["error"] for run in ran]
    assert {tuple(run["window"]) for run in ran if run["window"] and run["workload"] == "toy-lm"} == {(1, 1), (4, 2)}
    assert [run["samples"] for run in ran if run["workload"] == "toy-batch"] == [2, 2, 4, 4]
    for run in ran:
        assert len(run["step_seconds"]) == STEPS
        assert len(run["warm_up_seconds"]) == WARM_UP
        assert min(run["step_seconds"]) > 0
        assert run["host_peak_bytes"] > 10**8
        assert run["device_peak_bytes"] is None  # nobody counts a CPU
        assert run["limit"]["seconds"] == max(run["limit"]["lanes"].values()) > 0


@whole_bench
def test_systems_compute_the_same(toy):
    of_device = {(run["workload"], run["samples"]): run["values"] for run in toy["runs"] if run["system"] == "device"}
    for run in toy["runs"]:
        if run["system"] == "superpipeline" or (run["system"] in OF_OURS and run["status"] != "skipped"):
            values = of_device[run["workload"], run["samples"]]
            assert run["values"][: len(values)] == pytest.approx(values, rel=1e-5)


@whole_bench
def test_a_report_needs_nothing_but_the_file(toy, tmp_path, capsys):
    """Systems and workloads that nobody here has heard of are rendered as well."""
    text = json.dumps(toy).replace("toy-", "unheard-of-").replace('"superpipeline"', '"of another planet"')
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    bench.main(["render", str(tmp_path / "x.json"), "--plots", str(tmp_path / "plots")])
    printed = capsys.readouterr().out
    for workload in SETS["toy"]:
        name = workload.name.replace("toy-", "unheard-of-")
        assert f"## {name}\n" in printed
        assert (tmp_path / "plots" / f"{name}.svg").exists()
    assert printed.count("of another planet (x 4)") == len([w for w in SETS["toy"] if 4 in (w.ladder or (w.samples,))])
    assert "k=4, k'=2" in (tmp_path / "plots" / "unheard-of-lm.svg").read_text(encoding="utf-8").replace("&#x27;", "'")
    assert (tmp_path / "plots" / "unheard-of-lm-k.svg").exists()
    assert "no GPU" in printed
    assert "not measured" in printed


def test_a_run_over_the_time_limit_ends_and_is_reported(tmp_path, monkeypatch):
    """Rooflines and one process are measured, the second is still at it when time is up."""
    now, asked = 0.0, []
    answers = iter([{"rooflines": None, "workloads": {}}, {"status": "ok", "error": None, "step_seconds": [1.0]}, None])

    def take_40_seconds(processes: Any, function: Any, argument: Any, seconds: float) -> Any:
        nonlocal now
        now += 40.0
        asked.append(seconds)
        answer = next(answers)
        return answer and {**vars(argument), **answer} if asked[1:] else answer, failure("TimedOut", "it took long")

    monkeypatch.setattr(runner.Processes, "run", take_40_seconds)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    result = runner.run(
        settings(WORKLOADS["toy-vit"], WORKLOADS["toy-lm-noclip"], time_limit=120.0), tmp_path / "x", print
    )
    assert asked == [
        120.0,
        40.0,
        pytest.approx(4 * 40 / 7),
    ]  # all of it, then four even shares, but at least 20 seconds
    assert result == json.loads((tmp_path / "x").read_text(encoding="utf-8"))
    assert not result["complete"]
    outcomes = [(run["status"], run["error"] and run["error"]["type"]) for run in result["runs"]]
    assert outcomes == [("ok", None), *[("skipped", "TimeIsUp")] * 7]
    assert "the bench's time limit was reached while it ran" in result["runs"][1]["error"]["message"]


MISBEHAVING = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path

def hang(argument, path, log):
    from suite import worker
    worker._begin(log)
    if not os.fork():  # what it started is ended with it
        Path(argument).write_text(str(os.getpid()))
    time.sleep(600)

def die(argument, path, log):
    print("last words", flush=True)
    os.abort()

def eat(argument, path, log):
    time.sleep(600)

if __name__ == "__main__":
    from suite import host_memory, runner
    from suite.sets import WORKLOADS
    folder = Path(sys.argv[1])
    processes = runner.Processes(folder, on_gpu=False)
    told = [processes.run(hang, str(folder / "child"), 2.0), processes.run(die, None, 60.0)]
    free = iter([8 * 2**30])
    host_memory.free_bytes = lambda: next(free, 2**20)
    told.append(processes.run(eat, None, 60.0))
    free = iter(range(2**40, 2**41, 2**20))
    host_memory.free_bytes = lambda: next(free)
    refused = replace(WORKLOADS["toy-lm"], windows=((1, 2),))
    settings = runner.Settings([refused], ["device", "superpipeline"], 2, 1, 2, 120.0)
    told.append(runner.run(settings, folder / "x.json", print))
    (folder / "told.json").write_text(json.dumps(told))
"""


@whole_bench
def test_hung_dead_and_failing_processes_are_reported(tmp_path, monkeypatch):
    folders = [*map(str, [BENCHMARKS, BENCHMARKS.parent, ROOT]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join(folders))
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING, encoding="utf-8")
    call(tmp_path / "misbehaving.py", tmp_path)
    (hung, died, full, result) = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert hung[0] is None
    assert (hung[1]["type"], hung[1]["message"]) == ("TimedOut", "it took more than 2 s")
    assert "in hang" in hung[1]["details"]  # where it was
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()
    assert died[1]["type"] == "ProcessDied"
    assert "SIGABRT" in died[1]["message"]
    assert full[1]["type"] == "HostMemoryFull"
    # A system that fails is in the file with its error, is not tried again, and keeps nobody else from being measured.
    outcomes = [(run["system"], run["window"], run["round"], run["status"]) for run in result["runs"]]
    assert outcomes == [
        ("device", None, 0, "ok"),
        ("superpipeline", None, 0, "ok"),
        ("superpipeline", [1, 2], 0, "failed"),
        ("superpipeline", [1, 2], 1, "skipped"),
        ("superpipeline", None, 1, "ok"),
        ("device", None, 1, "ok"),
    ]
    assert result["runs"][2]["error"]["type"] == "ValueError"
    assert "k_prime" in result["runs"][2]["error"]["message"]
    assert "measure(job)" in result["runs"][2]["error"]["details"]
    row = next(line for line in report(result).splitlines() if "k=1, k'=2" in line)
    assert "ValueError: " in row
    assert "it did not work" not in row  # once is enough


# ---------------------------------------------------------------------------------------------------------- its parts


def settings(*workloads: Workload, rounds: int = 2, time_limit: float = 60.0) -> Any:
    return runner.Settings(workloads, ["device", "superpipeline"], rounds, WARM_UP, STEPS, time_limit)


class Linear(Network):
    """Multiplications that can be counted by hand: 2 * 8 * 16 in a token, and 3 tokens in a sample."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.first.requires_grad_(not frozen)

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, **batch: Tensor) -> Tensor:
        return self.second(self.first(batch["x"])).sum()


def by_hand(**options: Any) -> Workload:
    return Workload(
        name="by-hand",
        kind="train",
        network=Linear,
        batch=lambda samples, generator: {"x": torch.randn(samples, 3, 8, generator=generator)},
        samples=2,
        items="tokens",
        items_per_sample=3,
        **options,
    )


def test_the_demand_of_a_step_is_counted():
    demand = demand_of(by_hand())
    assert (demand.parameters, demand.trained) == (256, 256)
    assert demand.sent_bytes == demand.trained_bytes == 512  # bf16
    assert demand.flops_per_sample == demand.model_flops_per_sample == 6 * 256 * 3
    half = demand_of(replace(by_hand(), network=frozen))
    assert (half.trained, half.trained_bytes) == (128, 256)
    assert half.flops_per_sample == half.model_flops_per_sample == (4 * 256 + 2 * 128) * 3
    inference = demand_of(replace(by_hand(), kind="inference", precision="32-true"))
    assert inference.sent_bytes == 1024
    assert inference.flops_per_sample == inference.model_flops_per_sample == 2 * 256 * 3


def frozen() -> Network:
    return Linear(frozen=True)


RATES = {
    "to_device_bytes_per_second": 64.0,
    "to_host_bytes_per_second": 128.0,
    "both_ways_bytes_per_second": 96.0,
    "adamw_parameters_per_second": {"float32": 32.0, "bfloat16": 512.0},
    "matmul_flops": {"float32": 1.0, "bfloat16": 4608.0},
}


def limit(workload: Workload, samples: int = 1, device_bytes: int | None = None, offloads: bool = True) -> Any:
    return rooflines.limit(describe(workload), samples, RATES, device_bytes, offloads)


def test_the_limit_is_the_busiest_lane():
    expected = {"compute": 1.0, "to device": 8.0, "to host": 4.0, "optimizer": 8.0}
    assert limit(by_hand())["lanes"] == expected
    assert limit(by_hand(precision="bf16-true"))["lanes"] == {**expected, "optimizer": 0.5}
    assert limit(by_hand(), samples=9) == {"lanes": {**expected, "compute": 9.0}, "lane": "compute", "seconds": 9.0}
    assert limit(by_hand(), offloads=False) == {"lanes": {"compute": 1.0}, "lane": "compute", "seconds": 1.0}


@pytest.mark.parametrize("name", ["toy-lm", "toy-vit", "toy-clip", "toy-llava", "toy-resnet", "toy-generation"])
def test_blocks_of_a_network_share_no_weights(name):
    network = build_network(WORKLOADS[name])
    blocks = network.blocks()
    assert len(blocks) >= 4
    inside = [parameter for block in blocks for parameter in block.parameters()]
    assert len({id(parameter) for parameter in inside}) == len(inside) > 0


def test_list_prints_every_set_and_names_are_unique(capsys):
    bench.main(["list"])
    printed = capsys.readouterr().out
    for name, workloads in SETS.items():
        assert f"{name}: " in printed
        for workload in workloads:
            assert WORKLOADS[workload.name] is workload  # one of this name, also in another set
            assert f"    {workload.name}\n" in printed
            assert all(1 <= k_prime <= k for k, k_prime in workload.windows)


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


# ------------------------------------------------------------------------------------------------ what a file says


@cache
def described(name: str) -> dict[str, Any]:
    return describe(WORKLOADS[name])


def result_of(*runs: dict[str, Any]) -> dict[str, Any]:
    """A file of results for an H200 that nobody has seen."""
    workloads = {run["workload"]: described(run["workload"]) for run in runs}
    return {
        "began": "then",
        "complete": True,
        "settings": {"rounds": 1, "warm_up": 1, "steps": 3, "time_limit": 1.0},
        "machine": {
            "gpu": "a GPU", "driver": "1", "device_bytes": 2**37, "cpu": "a CPU", "cores": 16, "host_bytes": 2**37,
            "python": "3", "packages": {}, "revision": None, "modified": None,
        },
        "systems": {name: name for name in SYSTEMS},
        "rooflines": None,
        "workloads": workloads,
        "runs": list(runs),
    }  # fmt: skip


def ran(workload: str, system: str, seconds: list[float], device: int = 100, **more: Any) -> dict[str, Any]:
    """A record of a run."""
    options = {"window": None, "samples": WORKLOADS[workload].samples, "round": 0, **more}
    job = Job(workload, system, options["window"], options["samples"], options["round"], 1, len(seconds))
    return record(
        job,
        "ok",
        step_seconds=seconds,
        values=[options.get("value", 1.0)] * (1 + len(seconds)),
        device_peak_bytes=device,
        host_peak_bytes=options.get("host", 100),
        host_taken_bytes=0,
        waits=None,
        facts={},
        limit=options.get("limit"),
    )


def test_rounds_are_put_together():
    rounds = [
        ran("toy-lm", "device", [1.0, 9.0, 2.0], device=5),
        ran("toy-lm", "device", [3.0, 4.0], device=7, round=1),
    ]
    (entry,) = entries(result_of(*rounds))["toy-lm"]
    assert entry.seconds == 3.0
    assert entry.device_bytes == 7
    assert entry.items_per_second == 4 * 16 / 3.0
    assert entry.tflops == pytest.approx(demand_of(WORKLOADS["toy-lm"]).model_flops_per_sample * 4 / 3.0 / 1e12)


def test_a_system_that_computes_something_else_is_marked():
    text = report(
        result_of(
            ran("toy-lm", "device", [1.0], value=2.0),
            ran("toy-lm", "superpipeline", [1.0], value=2.01),
            ran("toy-lm", "fsdp2", [1.0], value=2.3),
            ran("toy-lm", "deepspeed-zero3", [1.0], value=float("nan")),
        )
    )
    marked = {line.split("|")[1].split("(")[0].strip() for line in text.splitlines() if "**differs**" in line}
    assert marked == {"fsdp2", "deepspeed-zero3"}


def verdicts(*runs: dict[str, Any]) -> list[tuple[str, str]]:
    return [row[1:] for row in targets(entries(result_of(*runs)))]


@pytest.mark.parametrize(
    ("seconds", "device", "met"),
    [(1.05, 39, "yes"), (1.2, 39, "no"), (1.05, 41, "no")],
    ids=["saves", "is slow", "saves too little"],
)
def test_the_target_for_memory(seconds, device, met):
    name = "qwen2.5-1.5b-8k"
    plain = ran(name, "device", [1.0])
    first, smallest, *_ = verdicts(
        plain,
        ran(name, "superpipeline", [1.0], device=90),  # as fast, but saves little: not what is asked for
        ran(name, "superpipeline", [seconds], device=device, window=(4, 1)),
        ran(name, "superpipeline", [9.0], device=14, window=(1, 1)),
    )
    assert first[1] == ("no" if device > 40 else met)
    assert smallest == ("86% less (qwen2.5-1.5b-8k)", "yes")
