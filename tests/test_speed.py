"""`sp-lightning check --speed`: measures in all three ways, and tells nothing about a person or a machine's name."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from sp_lightning import cli
from sp_lightning import speed as speed_module
from sp_lightning.speed import Shape, speed

TINY = Shape(width=16, layers=3, heads=2, vocabulary=32, rows=2, length=8)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured of a tiny decoder, on a machine whose rates are known."""
    monkeypatch.setattr(speed_module, "ON_CPU", TINY)
    monkeypatch.setattr(speed_module, "measure", lambda: {"host_bandwidth": 10.0})
    told: list[str] = []
    speed(torch.device("cpu"), told.append)
    return told


def test_three_runs_are_measured_and_are_one_line_of_json(lines):
    plain, streamed, other = lines[1:4]
    assert plain.startswith("plain: ")
    assert streamed.startswith("streamed within ")
    assert other.startswith("streamed within ")
    assert all("ms a step" in line for line in (plain, streamed, other))
    found = json.loads(lines[-1].splitlines()[-1])
    assert [run["budget_bytes"] is None for run in found["runs"]] == [True, False, False]
    assert all(run["tokens_per_second"] > 0 for run in found["runs"])
    assert found["decoder"]["layers"] == TINY.layers


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
    monkeypatch.setattr(speed_module, "speed", asked.append)
    monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", "cpu", "--speed"])
    assert cli.main() == 0
    assert asked == [torch.device("cpu")]
