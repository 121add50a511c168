"""Units that are sent to the device and leave it unread."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sp_lightning import superpipeline

pytestmark = pytest.mark.gpu


def test_a_place_is_not_poisoned_while_it_is_copied_to(device: torch.device) -> None:
    """The second device ends a process whose streams race."""
    model = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    pipeline = superpipeline(model, device, k=2, debug=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        with pipeline.step():
            x = torch.randn(4, 16, device=device)
            for number, block in enumerate(model):
                if (number + step) % 3:
                    x = block(x)
            loss = x.square().mean()
            loss.backward()
        assert torch.isfinite(loss)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.detach()
