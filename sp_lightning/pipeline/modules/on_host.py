"""Copies of weights for operations on the host, in a graph whose gradients arrive on the device.

An anchor that pulls weights back to where they were (`(p - start).square().sum()`, where a hook has cloned `start` from
weights) lies on the host, as masters do. If the master were the leaf of such a graph, autograd would add to its `.grad`
while the gradients of its unit arrive there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class OnHost(torch.autograd.Function):
    """From the leaf of a weight, whatever its memory holds now, to a copy of the weight's values on the host."""

    @classmethod
    def of(cls, leaf: nn.Parameter, values: Tensor) -> Tensor:
        """Return a copy of `values`, with `leaf` as its origin."""
        return cast("Tensor", cls.apply(leaf, values))

    @staticmethod
    def forward(ctx: Any, leaf: nn.Parameter, values: Tensor) -> Tensor:
        """Copy the values: what backward needs must not change when the optimizer steps."""
        ctx.device = leaf.device
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Bring the gradient to where the others of the weight are."""
        return gradients[0].to(ctx.device), None
