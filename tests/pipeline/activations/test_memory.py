"""Memory of activations: what counts as such."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.activations.memory import Meter
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
