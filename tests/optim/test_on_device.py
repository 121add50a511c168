"""Passes by torch's operations against those of the kernels: on the CPU no bit differs, except what is in codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import optim
from sp_lightning.optim import on_device, passes
from sp_lightning.optim.layout import BLOCK
from sp_lightning.optim.on_device import step_on_device

from .parts import CASES, compare

pytest.importorskip("numba")


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("cls", "options", "scaling", "dtype"), CASES)
def test_no_bit_differs(cls: Any, options: Any, scaling: Any, dtype: Any, moments: str) -> None:
    compare(cls, {"moments": moments, **options}, scaling, dtype, torch.device("cpu"))


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a weight whose dimensions lie in another order."""
    monkeypatch.setattr(passes, "_run_kernels", lambda steps: [step_on_device(step) for step in steps])

    def stepped(piece: int) -> list[Tensor]:
        monkeypatch.setattr(on_device, "PIECE", piece)
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(123, 61).bfloat16().t())
        optimizer = optim.AdamW([weight])
        for _ in range(2):
            weight.grad = torch.randn(61, 123).bfloat16()
            optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    assert all(torch.equal(*pair) for pair in zip(stepped(1 << 20), stepped(2 * BLOCK), strict=True))
