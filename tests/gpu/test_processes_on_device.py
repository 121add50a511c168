"""Two processes that share a device, and host memory, in which they add gradients up."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sp_lightning.pipeline import PipelineOptions

from ..helpers import assert_close_trace
from ..pipeline.gradients.parts import chain, train
from ..processes import in_processes

pytestmark = pytest.mark.gpu


def on_the_device() -> None:
    """Closely, as the reference is stepped on the device; through gloo, as NCCL refuses processes that share one."""
    device = str(torch.accelerator.current_accelerator())
    for accumulate, in_backward in product((1, 2), (False, True)):
        how = {"accumulate": accumulate, "device": device, "in_backward": in_backward}
        streamed = train(chain, PipelineOptions(k=2, debug=True), **how)
        assert_close_trace(train(chain, None, **how), streamed, atol=1e-6)


def test_two_processes_on_one_device() -> None:
    in_processes([on_the_device])
