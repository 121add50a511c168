"""`sp-lightning check` on a device."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.check import check

pytestmark = pytest.mark.gpu


def test_it_passes(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not bit-equal is named: the optimizer's rounding."""
    assert check(cuda)
    lines = capsys.readouterr().out.splitlines()
    assert all("same bits" in line or "AdamW's rounding" in line for line in lines if line.startswith("  "))
    assert sum("56 visits" in line for line in lines) == 2
