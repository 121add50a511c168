"""Clipping by norm takes no memory: gradients stay on the host as they came, unless they add up."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.pipeline import Pipeline
from tests.helpers import torchs_defaults

from .parts import adam, check_story, everything

WIDTH = 64
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)])


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "bytes_each"),
    [(torch.float32, 1, 2.1), (torch.float32, 2, 4.8), (torch.bfloat16, 1, 2.1), (torch.bfloat16, 2, 2.8)],
)
def test_gradients_stay_in_bf16_unless_they_accumulate(
    dtype: torch.dtype, micro_batches: int, bytes_each: float
) -> None:
    """Two bytes each, with their norms; sums are as masters are, and what is added lands in a few buffers first.

    Norms have the precision that they need, whatever is torch's default dtype.
    """

    def story(model: nn.Module, pipeline: Pipeline | None) -> list[Any]:
        optimizer, parameters = adam(model), list(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
                    loss = model(X.to(dtype)).square().mean()
                with pipeline.optimizers.clipping.measuring_norms() if pipeline else nullcontext():
                    loss.backward()
            if pipeline is None:
                nn.utils.clip_grad_norm_(parameters, 1e-3)
            else:
                pipeline.optimizers.clipping.clip_grad_norm(parameters, 1e-3)
                assert step == 0 or all(each.tensor is not None for each in pipeline._engine.stream.of.values()), (
                    "nobody waits"
                )
            optimizer.step()
        if pipeline is not None:
            found = pipeline.summary().host_gradient_bytes / sum(p.numel() for p in parameters)
            assert found <= bytes_each
        return everything(model, optimizer)

    with torchs_defaults(torch.float16):
        check_story(story, lambda: layers().to(dtype))
