"""Activations that wait on the host, on a real device: same numbers, less memory, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from ..second_device import IN_USE
from .parts import (
    BLOCKS,
    ROWS,
    WIDTH,
    big_chain,
    micro_step,
    on_device,
    quick_training,
    steps_that_wait_for_nothing,
    train,
)

pytestmark = pytest.mark.gpu


POLICIES = ["offload", "recompute_offload"]


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("k", [1, 3])
def test_activations_come_back_as_they_left(k: int, pin: bool, activations: str, cuda: torch.device) -> None:
    """With a device that lags far behind the host, memory is used again only when the copies are done with it."""
    quick_losses, quick_weights = quick_training(cuda)
    slow = big_chain(cycles=5_000_000)
    slow_losses, slow_weights = train(slow, cuda, k=k, pin_memory=pin, activations=activations)
    assert all(map(torch.equal, quick_losses, slow_losses))
    assert all(map(torch.equal, quick_weights, slow_weights))


@pytest.mark.parametrize("activations", POLICIES)
def test_no_host_synchronization_in_a_step(activations: str, cuda: torch.device) -> None:
    with on_device(big_chain(), cuda, activations=activations) as pipe:
        steps_that_wait_for_nothing(pipe, cuda, 7, first=4)  # the first two calls of a unit are looked at
        assert pipe.stats.offloaded_bytes > 0
        assert pipe.stats.activation_misses == 0


def test_peak_memory(device: torch.device) -> None:
    """Of what is kept otherwise, a third at most; weights and gradients on their way are the same in all."""
    api = torch.get_device_module(device)

    rows = (16 if IN_USE else 128) * ROWS

    def peak(activations: str) -> int:
        x = torch.randn(rows, WIDTH, device=device)
        with on_device(big_chain(), device, k=2, activations=activations) as pipe:
            micro_step(pipe, x[:ROWS])  # buffers that stay are made
            api.synchronize()
            before = api.memory_allocated()
            api.reset_peak_memory_stats()
            micro_step(pipe, x)
            return api.max_memory_allocated() - before

    assert peak("offload") <= 0.35 * peak("keep")
    inputs = BLOCKS * 4 * rows * WIDTH
    assert peak("recompute_offload") <= peak("recompute") - 0.6 * inputs
