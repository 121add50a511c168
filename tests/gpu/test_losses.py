"""chunked_cross_entropy on a real device: the numbers, the memory, and a host that waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_lightning import chunked_cross_entropy

from ..helpers import never_waiting
from ..second_device import IN_USE

pytestmark = pytest.mark.gpu

SIZES = (256, 190, 64, 4_000) if IN_USE else (2048, 1500, 512, 32_000)
TOKENS, LEARNED, WIDTH, VOCABULARY = SIZES


def loss_and_gradients(
    chunked: bool, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if chunked:
            loss = chunked_cross_entropy(hidden, weight, labels)
        else:
            loss = F.cross_entropy(F.linear(hidden, weight), labels)
    return [loss, *torch.autograd.grad(loss * 128, [hidden, weight])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_memory_and_no_waiting(device, dtype):
    api = torch.get_device_module(device)
    hidden = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    weight = torch.empty(VOCABULARY, WIDTH, device=device).normal_(0, WIDTH**-0.5).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), device=device)
    labels[LEARNED:] = -100
    found, peaks = [], []
    for chunked in (False, True):
        loss_and_gradients(chunked, hidden, weight, labels, dtype)  # workspaces
        before = api.memory_allocated()
        api.reset_peak_memory_stats()
        with never_waiting(device):
            found.append(loss_and_gradients(chunked, hidden, weight, labels, dtype))
        peaks.append(api.max_memory_allocated() - before)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert peaks[1] - weight.nbytes < 0.4 * (peaks[0] - weight.nbytes)  # the rest is the weight's gradient
