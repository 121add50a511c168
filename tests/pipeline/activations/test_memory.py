"""Memory of activations: what counts as such, and what it takes on the host."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.activations.memory import HostPool, Meter
from sp_lightning.pipeline.stats import Stats

from ..parts import host_backend


def test_an_activation_in_the_place_of_a_replaced_buffer_counts() -> None:
    """Memory is known by its identity, which no other tensor may get when a buffer is gone."""
    with host_backend() as backend:
        meter = Meter(backend, Stats())
        buffer = torch.ones(4)
        meter.leave_out([buffer])
        assert meter.hold(buffer[1:]) is None
        del buffer
        activations = [torch.ones(4) for _ in range(1000)]
        assert all(meter.hold(activation) is not None for activation in activations)


def test_a_wait_for_the_device_is_counted() -> None:
    """Where buffers that are too small make room for a larger one."""
    stats = Stats()
    with host_backend() as backend:
        pool = HostPool(backend, stats)
        pool.give_back(pool.take(1 << 12))
        assert pool.take(1 << 10).nbytes
        assert stats.host_syncs == 0
        pool.give_back(pool.take(1 << 12))
        pool.take(1 << 16)
        assert stats.host_syncs == 1
        pool.close()
