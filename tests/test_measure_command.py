"""`sp-lightning measure`: what it finds, keeps for `plan`, and says of it."""

from __future__ import annotations

import json

import pytest
import torch

from sp_lightning.pipeline.lanes.devices import HostBackend
from sp_lightning.planning import Machine, rates
from sp_lightning.planning.rates import kept_rates, probe, rates_file

from .test_plan_command import nothing_is_measured, planned, run, status

pytest.importorskip("numba")
assert nothing_is_measured

MODEL = "tests.test_plan_command.Stack --model.width 64"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little work, on a machine without a GPU."""
    for name, value in {"_STEPPED": 2**16, "_BLOCK": 2**16}.items():
        monkeypatch.setattr(rates, name, value)
    monkeypatch.setattr("sp_lightning.cli.full_device", lambda _: CPU)


def test_what_is_measured_is_what_plan_assumes():
    printed = run("sp-lightning measure")
    assert "There is no GPU: the host alone was measured." in printed
    assert str(rates_file()) in printed
    found = kept_rates(CPU)
    assert found.keys() == {"host_bandwidth"}
    report = planned(MODEL)
    assert report["assumptions"]["host_bandwidth"] == found["host_bandwidth"]
    assert report["measured"] == ["host_bandwidth"]
    given = planned(f"{MODEL} --host_bandwidth 1234")
    assert given["assumptions"]["host_bandwidth"] == 1234
    assert given["measured"] == [], "what is given wins"
    assert "measured on this machine: host_bandwidth; all else is assumed" in run(f"sp-lightning plan --model {MODEL}")
    rates_file().write_text(json.dumps({"another machine": {"host_bandwidth": 5.0}}))
    assert planned(MODEL)["measured"] == []


def test_a_device_is_probed():
    """The emulated one, whose copies and jobs are threads."""
    backend = HostBackend()
    try:
        machine = probe(backend, Machine(0.0, 0.0, 0.0), is_pinned=False)
    finally:
        backend.close()
    assert min(machine.to_device, machine.to_host, machine.both) > 0


def test_the_host_is_probed_with_far_more_than_caches_hold(monkeypatch):
    """What a step on the host, and copies beside it, touch together; the device has room for parts of it alone."""
    monkeypatch.undo()
    backend, taken, on_device = HostBackend(), [], []
    work = rates._work

    def noted(backend, *memory):
        taken.extend(memory)
        return work(backend, *(part[: 2**20] for part in memory))

    monkeypatch.setattr(rates, "_work", noted)
    monkeypatch.setattr(
        backend, "allocate", lambda nbytes: on_device.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
    )
    try:
        probe(backend, Machine(25e9, 25e9, 60e9), is_pinned=False)
    finally:
        backend.close()
    assert sum(part.nbytes for part in taken) >= 9e8
    assert len({part.data_ptr() for part in taken}) == 4


@pytest.mark.parametrize("text", ["no JSON", "[]"])
def test_a_file_that_cannot_be_read(text, capsys):
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(text)
    assert status(f"sp-lightning plan --model {MODEL}") == 2
    assert f"{rates_file()} is not what `sp-lightning measure` writes" in capsys.readouterr().err
    assert status("sp-lightning measure") == 0
    assert kept_rates(CPU)
    assert [file.name for file in rates_file().parent.iterdir()] == ["rates.json"]
    rates_file().unlink()
    rates_file().mkdir()
    assert status("sp-lightning measure") == 2
    printed = capsys.readouterr()
    assert "is a directory" in printed.err.lower()
    assert "GB/s" in printed.out, "what was measured is seen all the same"


def test_errors(capsys, monkeypatch):
    assert status("sp-lightning measure --modle x") == 2
    assert "sp-lightning: error: unrecognized arguments: --modle x" in capsys.readouterr().err
    monkeypatch.setattr("sp_lightning.cli.find_spec", lambda name: None if name == "numba" else object())
    assert status("sp-lightning measure") == 2
    assert "measure needs numba: pip install 'sp-lightning[fast]'" in capsys.readouterr().err
