"""`sp-lightning check`: passes where training is exact, counts what happened, and sees a single bit."""

from __future__ import annotations

import getpass
import json
import math
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import drive_speed
import machine_speed as speed_module
import pytest
import read_speed
import torch
from machine_speed import Shape, speed

from sp_lightning import cli
from sp_lightning.check import _UPLOADS, _judge, _Placed, _train, lost_uploads
from sp_lightning.pipeline import Engine, WindowPlan
from sp_lightning.pipeline.lanes.accelerator import make_backend
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.optimizer import state_file
from sp_lightning.planning.work import Machine

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", "cpu"])
    return cli.main(), capsys.readouterr().out.splitlines()


def test_it_passes_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same bits in each way and precision, and units are updated and stay where they should."""
    status, lines = run(monkeypatch, capsys)
    assert status == 0
    ways = [line for line in lines if line.startswith("  ")]
    assert len(ways) == 12
    assert all("same bits" in line for line in ways)
    assert sum("56 GPU updates" in line for line in ways) == 2
    assert sum("8 units stay on the GPU" in line for line in ways) == 2
    assert lines[-1].endswith("the CPU: right in 12 ways")


@pytest.mark.usefixtures("without_numba")
def test_it_needs_no_numba(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing package is not a wrong number, and torch's own kernels update the units that visit."""
    status, lines = run(monkeypatch, capsys)
    assert status == 0
    assert sum("56 GPU updates" in line for line in lines) == 2


def test_what_cannot_happen_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a CPU whose AdamW has other bits than the kernels: units are updated elsewhere, and nothing is wrong."""
    for module in ("check", "optim.of_torch"):
        monkeypatch.setattr(f"sp_lightning.{module}.has_torchs_bits", lambda *_: False)
    status, lines = run(monkeypatch, capsys)
    assert status == 0
    assert sum("skipped: this CPU's AdamW" in line for line in lines) == 2
    assert "right in 10 ways; 2 do not apply here, because this CPU's AdamW rounds in another way" in lines[-1]


def test_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one weight, of one step, in one of the ways."""
    before_step = _Placed.before_step

    def spoil(self: _Placed, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        if self.visit and engine.stats.steps == 3:
            weight = next(iter(engine.module.parameters()))
            with torch.no_grad():
                weight.view(torch.int32)[7] ^= 1
        return before_step(self, engine, builds_graph)

    monkeypatch.setattr(_Placed, "before_step", spoil)
    status, lines = run(monkeypatch, capsys)
    assert status == 1
    assert [line.split("  ")[1].strip() for line in lines if "OTHER NUMBERS" in line] == ["updated on the GPU"] * 2
    assert lines[-1].endswith("wrong: updated on the GPU in 32-true, updated on the GPU in bf16-mixed")


def test_what_else_is_seen() -> None:
    """Plain training is the same each time; NaN anywhere, a gradient that is missing, and units that never came."""
    plain, other = _train(CPU, "32-true"), _train(CPU, "32-true")
    assert plain.placed == 0
    assert _judge(plain, other, CPU, places=False) == (True, "same bits")
    assert _judge(plain, other, CPU, places=True) == (False, "NO UNIT WAS THERE")
    assert not _judge(plain, other._replace(first=other.first[:-1]), CPU, places=False)[0]
    nan = [*other.weights[:-1], other.weights[-1] * torch.nan]
    for device in (CPU, torch.device("cuda")):
        assert not _judge(plain, other._replace(weights=nan), device, places=False)[0]


def test_copies_that_do_not_arrive_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As WSL2 was reported to lose them, without an error."""
    with closing(make_backend(CPU, 1, processes=1, debug=False)) as backend:
        assert lost_uploads(backend, CPU) == 0
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: self)
        assert lost_uploads(backend, CPU) == _UPLOADS


def test_the_notebook() -> None:
    """Its last cells are the commands."""
    cells = json.loads((Path(__file__).parents[1] / "examples/check_on_colab.ipynb").read_text())["cells"]
    assert [cell["source"] for cell in cells[-2:]] == [["!sp-lightning check"], ["!sp-lightning check --speed"]]


# ------------------------------------------------------------ --speed: measures in all ways, and tells of no person


TINY = Shape(width=16, layers=3, heads=2, vocabulary=32, rows=2, length=8)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured of a tiny decoder, on a machine whose rates are known."""
    monkeypatch.setattr(speed_module, "ON_CPU", TINY)
    machine = Machine(25e9, math.inf, 10e9)
    monkeypatch.setattr(speed_module, "measured_machine", lambda: machine)
    told: list[str] = []
    speed(torch.device("cpu"), told.append)
    return told


def test_runs_are_measured_and_are_one_line_of_json(lines, capsys, tmp_path):
    assert [line.partition(":")[0] for line in lines[1:5]] == [way.name for way in speed_module._WAYS]
    assert all("ms a step" in line for line in lines[1:5])
    assert lines[5].startswith("`sp-lightning plan MODEL --link 25 --host-bandwidth 10` plans with the rates")
    line = lines[-1].splitlines()[-1]
    found = json.loads(line, parse_constant=pytest.fail)
    card = {**found, "pcie_generation": "4", "pcie_width": "8"}
    assert speed_module._as_arguments(card).startswith("PCIe 4.0 x8: `sp-lightning plan MODEL --link 25")
    assert found["gb_per_second"] == {"host": 10.0, "up": 25.0, "down": None, "both": None, "ram": None}
    assert found["decoder"]["layers"] == TINY.layers
    of_the_card = {"driver", "cuda", "pcie_generation", "pcie_width", "power_limit_watts"}
    assert found.keys() >= of_the_card | {"huge_pages", "numba"}
    assert found["product_tflops"] > 0
    for run in found["runs"]:
        assert run["tokens_per_second"] > 0
        assert run["spread"][0] <= run["step_seconds"] <= run["spread"][1]
        if run["share"] is not None:
            assert run["planned_seconds"] > 0
            assert run["lane_seconds"].keys() == {lane.value for lane in Lane}
    (tmp_path / "found.json").write_text(line)
    read_speed.main([str(tmp_path / "found.json")])
    assert capsys.readouterr().out.count("planned / measured") == 3


def test_a_slow_machine_has_no_figure_of_zero():
    """Rounded figures keep their significant digits, and their order."""
    assert [speed_module._rounded(value) for value in (0.0, 0.00123456, 98765.4)] == [0.0, 0.001235, 98770.0]
    assert speed_module._in_giga(2e6) == 0.002


def test_the_line_names_nobody(lines):
    line = lines[-1].splitlines()[-1]
    assert not [name for name in (getpass.getuser(), socket.gethostname(), Path.home().name, "/") if f'"{name}' in line]


def test_a_decoder_that_is_too_large_has_fewer_layers(monkeypatch):
    monkeypatch.setattr(speed_module, "available_host_memory", lambda: 4 * 16 * TINY.parameters)
    assert speed_module._that_fits(TINY, None) == TINY
    monkeypatch.setattr(speed_module, "available_host_memory", lambda: 16 * TINY.parameters)
    assert speed_module._that_fits(TINY, None).layers == 2


def test_the_command_measures(monkeypatch):
    """On the device that is named, and does nothing else."""
    asked: list[Any] = []
    scripts: list[str] = []

    def run(path: str) -> dict[str, Any]:
        assert Path(path).is_file()
        scripts.append(Path(path).name)
        return {"speed": asked.append}

    monkeypatch.setattr(cli.runpy, "run_path", run)
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", "cpu", "--speed"])
    assert cli.main() == 0
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", "--speed", "--nvme-path", "/scratch"])
    assert cli.main() == 0
    assert asked == [torch.device("cpu"), "/scratch"]
    assert scripts == ["machine_speed.py", "drive_speed.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nvme-path", "."], "`--nvme-path` needs `--speed`"),
        (["--speed", "--nvme-path", "nowhere"], "`nvme_path='nowhere'`: no file can be made there: No such file"),
    ],
)
def test_a_folder_that_cannot_be_measured(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", *arguments])
    assert cli.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sp-lightning: error: {message}")
    assert said.count("\n") == 1


def test_a_drive_is_measured(monkeypatch):
    monkeypatch.setattr(state_file, "_type_of_file_system", lambda device: "ext4")
    monkeypatch.setattr(drive_speed, "_FILE", 2 * drive_speed.BUFFER)
    monkeypatch.setattr(drive_speed, "_WINDOW", 0.001)
    monkeypatch.setattr(drive_speed, "_SHORT", 0.001)
    told: list[str] = []
    found = drive_speed.speed(".", told.append, limit=0.0)
    assert min(found.read, found.write, found.both, found.written) > 0
    assert not found.is_past_cache
    assert "which did not fall in" in told[1]
    assert told[2].startswith(f"`sp-lightning plan MODEL --nvme-read {found.read:.3g} --nvme-write {found.write:.3g} ")
    assert not [*Path().iterdir()]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([5.0] * 14, False),
        ([5.0] * 30, False),
        ([5.0] * 10 + [1.0] * 10, True),
        ([5.0] * 10 + [1.0] * 7, False),  # it still falls
        ([5.0] * 10 + [4.0] * 10, False),
    ],
)
def test_a_cache_is_full_when_the_rate_has_fallen_and_stays(rates, expected):
    assert drive_speed.is_past_cache(rates) is expected
