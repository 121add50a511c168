"""Units that live on a real device: their parameters, gradients and state are there, and nothing of them travels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions

from ..helpers import is_block, lightning_run
from ..planning.parts import Fixed
from ..zoo import CASES
from ..zoo.blocks import chain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


Trained = tuple[list[torch.Tensor], AdamW]


def train(model: nn.Module, device: torch.device, pipeline: Pipeline | None, fused: bool | None) -> Trained:
    optimizer = AdamW(model.parameters(), 1e-2, fused=fused)
    torch.manual_seed(1)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(8, 16, device=device)).square().mean()
        if pipeline is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            with pipeline.optimizers.clipping.measuring_norms():
                loss.backward()
            pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, optimizer


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("there", [(1, 4), range(7)], ids=["some", "all"])
def test_they_live_there_and_come_back(there: Sequence[int], fused: bool | None, device: torch.device) -> None:
    """The losses are those of plain training on the device, as far as two optimizers round alike."""
    torch.manual_seed(0)
    expected, _ = train(chain(6, 16, 32).to(device), device, None, fused)
    torch.manual_seed(0)
    model = chain(6, 16, 32)
    options = PipelineOptions(units=is_block)
    pipeline = Pipeline(model, device, options=options, planner=Fixed((2, 1), (2, 1), (2, 1, (), there)))
    actual, optimizer = train(model, device, pipeline, fused)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    living = [parameter for number in there if number < 6 for parameter in model.blocks[number].parameters()]
    assert all(parameter.device == device for parameter in living)
    assert pipeline.summary().pinned == (device.type == "cuda"), "all that is still sent"
    assert all(value.device == device for p in living for value in optimizer.state[p].values() if value.dim())
    pipeline.detach()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(value.device.type == "cpu" for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_under_lightning(precision: str, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lightning_run(CASES["vit"], "auto", precision, accelerator=accelerator)
    planner = Fixed((2, 1), (2, 1, (), (1, 2)))
    monkeypatch.setattr("sp_lightning.strategy.AutoPlanner", lambda *_: planner)
    actual = lightning_run(CASES["vit"], SuperpipelineStrategy(k="auto"), precision, accelerator=accelerator)
    assert max(on_device for *_, on_device in planner.seen) > 0
    for label in [label for label in expected if "/ loss" in label]:
        torch.testing.assert_close(actual[label], expected[label], rtol=2e-2, atol=1e-3)
