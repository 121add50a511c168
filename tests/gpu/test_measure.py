"""`sp-lightning plan --measure` and the bench on a device, with little work: what they find, and leave behind."""

from __future__ import annotations

import pytest
import torch
from suite import rooflines

from sp_lightning.planning import rates

pytestmark = pytest.mark.gpu


def test_copies_of_the_bench_are_ordered_after_the_memory_they_fill(cuda: torch.device) -> None:
    """The second device ends a process whose streams race."""
    assert min(rooflines._copies_of_gpu(1 << 20).values()) > 0


def test_all_rates_of_a_device(monkeypatch):
    for name, value in {"_STEPPED": 2**16, "_BLOCK": 2**23}.items():
        monkeypatch.setattr(rates, name, value)
    before = torch.cuda.memory_allocated()
    found = rates.measure()
    # a host's memory that copies and steps do not slow down has no rate of its own
    assert {"host_bandwidth", "link"} <= found.keys() <= {"host_bandwidth", "link", "memory_bandwidth"}
    assert min(found.values()) >= 0, "of so little"
    assert torch.cuda.memory_allocated() == before
