"""Without numba's kernels, torch's update weights: the same bits, and one warning that says what it costs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import optim, superpipeline


def stepped_in_codes() -> list[Tensor]:
    """A weight after some updates with moments of 8 bits, and its state."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(130, 17).bfloat16())
    optimizer = optim.AdamW([weight], moments="int8")
    for _ in range(3):
        weight.grad = torch.randn(130, 17).bfloat16()
        optimizer.step()
    return [weight.detach(), *optimizer.state[weight].values()]


def trained(streamed: bool, autocast: bool) -> list[Tensor]:
    """Weights that torch's fused AdamW has updated, which streamed training updates in one pass each."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pipeline = superpipeline(model, "cpu", k=2) if streamed else None
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(4, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if pipeline is not None:
        pipeline.detach()
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("autocast", [False, True])
def test_streamed_training_has_the_bits_of_plain_training(autocast: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert all(map(torch.equal, trained(True, autocast), trained(False, autocast)))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "numba cannot be imported" in warning
    assert "pip install 'sp-lightning[fast]'" in warning


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_optimizer_has_the_bits_of_torchs(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(130, 17).to(dtype))
    plain = nn.Parameter(weight.detach().float().clone())
    ours, theirs = optim.AdamW([weight]), torch.optim.AdamW([plain], fused=True)
    for _ in range(3):
        weight.grad = torch.randn(130, 17).to(dtype)
        plain.grad = weight.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(ours.master(weight), plain)


@pytest.mark.usefixtures("without_numba")
def test_moments_in_codes_stay_reproducible() -> None:
    assert all(map(torch.equal, stepped_in_codes(), stepped_in_codes()))
