"""`sp-lightning measure`: what it finds, keeps for `plan`, and says of it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest
import torch

from sp_lightning.pipeline.lanes.devices import HostBackend
from sp_lightning.planning import expected, rates
from sp_lightning.planning.expected import Link, link_of, table
from sp_lightning.planning.rates import Rates, kept_rates, measure, measure_device, rates_file

from .test_plan_command import nothing_is_measured, planned, run, status

pytest.importorskip("numba")
assert nothing_is_measured

MODEL = "tests.test_plan_command.Stack --model.width 64"
H200 = Rates(
    "NVIDIA H200, a CPU, 16 cores", "2026-11-28", 94, 62, 120, True, 54, 53, 92, 60, 70, 1500, 400, 707
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little work, on a machine without a GPU."""
    small = {"_STEPPED": 2**16, "_COPIED": 2**16, "_MULTIPLIED": 32, "_SECONDS_TOGETHER": 0.05}
    for name, value in small.items():
        monkeypatch.setattr(rates, name, value)
    for module in ("sp_lightning.cli", "sp_lightning.planning.rates"):
        monkeypatch.setattr(f"{module}.full_device", lambda _: torch.device("cpu"))


def test_what_is_measured_is_what_plan_assumes():
    printed = run("sp-lightning measure")
    assert "There is no GPU: the host alone was measured." in printed
    assert str(rates_file()) in printed
    kept = kept_rates()
    found = kept.assumptions()
    assert found.keys() == {"host_bandwidth", "host_bandwidth_int8", "memory_bandwidth"}
    report = planned(MODEL)
    assert {name: report["assumptions"][name] for name in found} == found
    assert report["measured"] == list(found)
    given = planned(f"{MODEL} --host_bandwidth 1234")
    assert given["assumptions"]["host_bandwidth"] == 1234
    assert given["measured"] == list(found)[1:], "what is given wins"
    says = f"measured on {kept.day} on this machine ({kept.machine}): host_bandwidth_int8, memory_bandwidth; all else"
    assert says in run(f"sp-lightning plan --host_bandwidth 1234 --model {MODEL}")
    assert json.loads(run("sp-lightning measure --json")).keys() == asdict(kept).keys()


def test_a_device_is_measured_too():
    """The emulated one, whose copies and jobs are threads."""
    backend = HostBackend()
    try:
        host = measure(backend)
        step = rates._Step(torch.device("cpu"), 2**16, "fp32")
        found = measure_device(host, backend, step)
    finally:
        backend.close()
    assert all(getattr(found, field.name) is not None for field in fields(found))
    assert found.assumptions().keys() >= {"to_device", "to_host", "both_ways", "device_step", "device_step_int8"}
    assert H200.assumptions() == {
        "to_device": 54, "to_host": 53, "compute": 353.5, "host_bandwidth": 94, "host_bandwidth_int8": 62,
        "both_ways": 92, "memory_bandwidth": 130, "device_step": 1500, "device_step_int8": 400,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"a": 1}', '{"machine": {"day": "today"}}'])
def test_a_file_that_cannot_be_read(text, capsys, monkeypatch):
    monkeypatch.setattr(rates, "machine_name", lambda: "machine")
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(text)
    assert status(f"sp-lightning plan --model {MODEL}") == 2
    assert f"{rates_file()} is not what `sp-lightning measure` writes" in capsys.readouterr().err
    assert status("sp-lightning measure") == 0
    assert kept_rates() is not None
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


@pytest.mark.parametrize(
    ("changed", "link", "says"),
    [
        ({}, Link(5, 16), ""),
        ({"to_device": 12.0}, Link(5, 8), "the device has 8 lanes of 16"),
        ({"to_device": 12.0, "is_pinned": False}, Link(5, 16), "host memory could not be page-locked"),
        ({"to_host": 12.0}, Link(5, 16), "the slot is of an older PCIe, or this process runs far from the device"),
        ({"both_ways": 55.0}, Link(5, 16), "is shared by both directions"),
        ({"host_memory": 20.0}, None, "few channels of memory"),
        ({"host_bandwidth": 30.0}, None, "few cores, or others use them"),
        ({"matmul": 200.0}, None, "others use the device, or it is hot"),
        ({"matmul": 200.0, "machine": "Another"}, None, ""),
    ],
)
def test_what_is_slow_and_why(changed, link, says):
    found = table(Rates(**{**asdict(H200), **changed}), link)
    slow = [line.partition("slow: ")[2] for line in found.splitlines() if "slow: " in line]
    assert len(slow) == bool(says)
    assert says in "".join(slow)


def test_the_link_of_a_device(tmp_path, monkeypatch):
    """As the system states it; where it does not, as the maker does."""
    place = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(expected, "_PCI_DEVICES", tmp_path)
    device = torch.device("cuda", 0)
    assert link_of(device) == Link(4, 16)
    folder = tmp_path / "0000:1a:00.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text("8.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("8\n")
    assert link_of(device) == Link(3, 8)
    (folder / "max_link_speed").write_text("Unknown\n")
    assert link_of(device) == Link(4, 16)
    place.name = "Another"
    assert link_of(device) is link_of(torch.device("cpu")) is None
