"""Gradients added up: in the bits of an addition at once."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.pipeline.gradients import sums
from sp_lightning.pipeline.gradients.sums import cast_and_add


@pytest.mark.parametrize("count", [0, 1, 5, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_casting_and_adding_piece_by_piece(monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype) -> None:
    """Below, at and above the size of a piece; in the bits of an addition at once."""
    monkeypatch.setattr(sums, "_CHUNK", 16)
    total, arrived = torch.randn(count), torch.randn(count).to(dtype)
    expected = total + arrived.float()
    cast_and_add(total, arrived)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("same_strides", [True, False])
def test_casting_and_adding_other_layouts(monkeypatch: pytest.MonkeyPatch, same_strides: bool) -> None:
    """Element by element, however the two lie in memory."""
    monkeypatch.setattr(sums, "_CHUNK", 16)
    total = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    arrived = torch.randn(2, 3, 4, 5).bfloat16()
    if same_strides:
        arrived = arrived.to(memory_format=torch.channels_last)
    expected = total + arrived.float()
    cast_and_add(total, arrived)
    assert torch.equal(total, expected)
