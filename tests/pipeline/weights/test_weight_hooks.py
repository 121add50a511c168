"""Users' hooks on weights."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_lightning.pipeline.weights.weight_hooks import run_hooks


def test_hooks_run_in_order_and_may_only_look() -> None:
    """What one returns is what the next one gets."""
    seen: list[Tensor] = []
    changed = run_hooks([lambda gradient: gradient * 2, seen.append, lambda gradient: gradient + 1], torch.ones(3))
    assert changed.tolist() == [3.0, 3.0, 3.0]
    assert [each.tolist() for each in seen] == [[2.0, 2.0, 2.0]]
