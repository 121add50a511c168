"""`sp-lightning check --speed`: measures in all ways, and tells nothing about a person or a machine's name."""

from __future__ import annotations

import getpass
import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import machine_speed as speed_module
import pytest
import read_speed
import torch
from machine_speed import Shape, speed

from sp_lightning import cli
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.planning.work import Machine

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
    line = lines[-1].splitlines()[-1]
    found = json.loads(line, parse_constant=pytest.fail)
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
    asked: list[torch.device] = []
    scripts: list[Path] = []

    def run(path: str) -> dict[str, Any]:
        scripts.append(Path(path))
        return {"speed": asked.append}

    monkeypatch.setattr(cli.runpy, "run_path", run)
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", "cpu", "--speed"])
    assert cli.main() == 0
    assert asked == [torch.device("cpu")]
    assert scripts == [Path(speed_module.__file__)]
