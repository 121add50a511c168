"""Two processes that share a device: their gradients are averaged there, and leave as averages."""

from __future__ import annotations

import pytest
import torch

from ..pipeline.gradients.parts import assert_averages_closely
from ..processes import in_processes

pytestmark = pytest.mark.gpu


def on_the_device() -> None:
    """Closely, as the reference is stepped on the device; through gloo, as NCCL refuses processes that share one."""
    device = str(torch.accelerator.current_accelerator())
    for accumulate in (1, 2):
        assert_averages_closely(accumulate=accumulate, device=device)


def test_two_processes_on_one_device() -> None:
    in_processes([on_the_device])
