"""What a module has besides weights that stream lives on the device, as after `module.to(device)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from .parts import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")]


class Anchored(nn.Module):
    """Computes with anchors that are no buffer, and moves them itself, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.anchors = torch.ones(4)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> nn.Module:  # type: ignore[override]
        super()._apply(fn, *args)
        self.anchors = fn(self.anchors)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.anchors


class Measured(nn.Module):
    """Notes its mean in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach())
        return self.layer(x)


@pytest.mark.parametrize(
    "make", [Anchored, Measured, lambda: torch.jit.script(nn.BatchNorm1d(4))], ids=["own", "metric", "scripted"]
)
def test_it_is_where_forward_needs_it(make: Callable[[], nn.Module], device: torch.device) -> None:
    results = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
        x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        if streamed:
            with on_device(model, device, k=1, units=nn.Linear):
                model(x).square().sum().backward()
            assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        else:
            model.to(device)(x).square().sum().backward()
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(*results)
