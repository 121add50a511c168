"""`sp-lightning check`, `plan --measure` and the bench on a device."""

from __future__ import annotations

import pytest
import torch
from suite import rooflines

from sp_lightning.check import check
from sp_lightning.check_program.program import check_program
from sp_lightning.planning import rates

pytestmark = pytest.mark.gpu


def test_it_passes(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not bit-equal is named: the optimizer's rounding."""
    assert check(cuda)
    lines = capsys.readouterr().out.splitlines()
    assert all("same bits" in line or "AdamW's rounding" in line for line in lines if line.startswith("  "))
    assert sum("56 GPU updates" in line for line in lines) == 2


def test_a_program_passes(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a user, which logs times: up to the first update all bits are the same, and later all but rounding."""
    program = "tests.test_check_program"
    assert check_program([f"--model={program}.Net", f"--data={program}.Data", "--model.times=metric"], cuda, steps=3)
    lines = capsys.readouterr().out.splitlines()
    ways = [line for line in lines if line.startswith("  ")]
    assert len(ways) == 18
    assert all("same bits" in line or "the optimizer's rounding" in line for line in ways)
    assert "the numbers of plain training in all 18 ways" in lines[-1]


def test_copies_of_the_bench_are_ordered_after_the_memory_they_fill(cuda: torch.device) -> None:
    """The second device ends a process whose streams race."""
    assert min(rooflines._copies_of_gpu(1 << 20).values()) > 0


def test_all_rates_of_a_device(monkeypatch):
    """With little work."""
    for name, value in {"_STEPPED": 2**16, "_BLOCK": 2**23}.items():
        monkeypatch.setattr(rates, name, value)
    before = torch.cuda.memory_allocated()
    found = rates.measure()
    # a host's memory that copies and steps do not slow down has no rate of its own
    assert {"host_bandwidth", "link"} <= found.keys() <= {"host_bandwidth", "link", "memory_bandwidth"}
    assert min(found.values()) >= 0, "of so little"
    assert torch.cuda.memory_allocated() == before
