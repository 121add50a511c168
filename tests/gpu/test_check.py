"""`sp-lightning check` on a device."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.check import check
from sp_lightning.check_program.program import check_program

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
