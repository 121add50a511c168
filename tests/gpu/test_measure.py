"""`sp-lightning measure` and the bench on a device, with little work: what they find, and leave behind."""

from __future__ import annotations

import pytest
import torch
from suite import rooflines

from sp_lightning.pipeline.lanes.devices import full_device, make_backend
from sp_lightning.planning import rates

pytestmark = pytest.mark.gpu


def test_copies_of_the_bench_are_ordered_after_the_memory_they_fill(cuda: torch.device) -> None:
    """The second device ends a process whose streams race."""
    assert min(rooflines._copies_of_gpu(1 << 20).values()) > 0


def test_all_rates_of_a_device(monkeypatch):
    for name, value in {"_STEPPED": 2**16, "_BLOCK": 2**16}.items():
        monkeypatch.setattr(rates, name, value)
    device = full_device(None)
    before = torch.cuda.memory_allocated(device)
    backend = make_backend(device, "auto", processes=1, debug=False)
    try:
        found = rates.measure(backend)
    finally:
        backend.close()
    assert torch.cuda.get_device_name(device) in rates.machine_name(device)
    assert {"to_device", "to_host", "both_ways", "host_bandwidth"} <= found.keys()
    assert min(found.values()) > 0
    assert torch.cuda.memory_allocated(device) == before
