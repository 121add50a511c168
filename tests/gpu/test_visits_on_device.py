"""Units that visit a real device, live there, or are stepped on the host, drawn at random: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning import optim
from sp_lightning.pipeline import Pipeline, PipelineOptions, Planner
from sp_lightning.pipeline.optimizer import pieces

from ..helpers import is_block
from ..planning.parts import Fixed, Wanders
from ..zoo.blocks import chain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=1e-2),
    "int8": partial(optim.SGD, lr=1e-1, momentum=0.9, moments="int8"),
}


def train(name: str, planner: Planner, device: torch.device, way: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = chain(6, 16, 48).to(dtype)
    pipeline = Pipeline(model, device, options=PipelineOptions(units=is_block), planner=planner)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for step in range(10):
        scopes = {
            "in backward": pipeline.optimizers.stepping_in_backward(optimizer),
            "clipped": pipeline.optimizers.clipping.measuring_norms(),
            "accumulated": nullcontext(),
        }
        for micro in range(2 if way == "accumulated" else 1):
            torch.manual_seed(10 * step + micro)
            loss = model(torch.randn(8, 16, device=device, dtype=dtype)).square().mean()
            with scopes[way]:
                loss.backward()
        if way == "clipped":
            pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    visits = pipeline.stats.visits
    pipeline.detach()
    return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())], visits


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("way", ["in backward", "clipped", "accumulated"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW", torch.float32), ("AdamW", torch.bfloat16), ("int8", torch.float32)]
)
def test_placement_changes_no_number(
    name: str, dtype: torch.dtype, way: str, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1024)
    expected, _ = train(name, Fixed((2, 1)), device, way, dtype)
    actual, visits = train(name, Wanders(seed), device, way, dtype)
    assert visits > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
