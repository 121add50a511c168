"""What the host and the links of a machine give, where recorded steps do not show it."""

from __future__ import annotations

from contextlib import closing

import torch

from sp_lightning.pipeline.lanes.accelerator import HostBackend
from sp_lightning.planning import rates
from sp_lightning.planning.rates import probe
from sp_lightning.planning.work import Machine


def test_a_device_is_probed(monkeypatch):
    """The emulated one, whose copies and jobs are threads."""
    monkeypatch.setattr(rates, "_BLOCK", 2**16)
    with closing(HostBackend()) as backend:
        machine = probe(backend, Machine(0.0, 0.0, 0.0), is_pinned=False)
    assert min(machine.to_device, machine.to_host, machine.both) > 0


def test_the_host_is_probed_with_far_more_than_caches_hold(monkeypatch):
    """What a step on the host, and copies beside it, touch together; the device has room for parts of it alone."""
    backend, taken, on_device = HostBackend(), [], []
    work = rates._work

    def noted(backend, *memory):
        taken.extend(memory)
        return work(backend, *(part[: 2**20] for part in memory))

    monkeypatch.setattr(rates, "_work", noted)
    monkeypatch.setattr(
        backend, "allocate", lambda nbytes: on_device.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
    )
    with closing(backend):
        probe(backend, Machine(25e9, 25e9, 60e9), is_pinned=False)
    assert sum(part.nbytes for part in taken) >= 9e8
    assert len({part.data_ptr() for part in taken}) == 4
