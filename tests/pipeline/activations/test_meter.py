"""Bytes that saved tensors hold: memory once, weights and buffers never."""

from __future__ import annotations

import torch
from torch import nn

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.activations.saved import Kept
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key

from ..parts import RecordingBackend


def meter() -> tuple[Meter, Stats]:
    stats = Stats()
    return Meter(RecordingBackend(), stats), stats


def test_memory_counts_once() -> None:
    """However many views of it are saved, and as a whole, because all of it stays."""
    counting, stats = meter()
    whole = torch.empty(10, 10)
    kept = [Kept(whole, counting), Kept(whole[0], counting), Kept(whole.t(), counting)]
    assert stats.activation_bytes == counting.bytes == 400
    kept.append(Kept(torch.empty(5), counting))
    assert stats.activation_bytes == 420
    del kept[0]
    assert stats.activation_bytes == 420
    kept.clear()
    assert stats.activation_bytes == 0
    assert stats.activation_peak_bytes == counting.step_peak == 420


def test_each_step_has_a_peak_of_its_own() -> None:
    """What is held from before counts in it, what was held once does not."""
    counting, _ = meter()
    kept = [Kept(torch.empty(10), counting), Kept(torch.empty(20), counting)]
    del kept[1]
    assert counting.step_peak == 120
    counting.begin_step()
    assert counting.step_peak == 40
    kept.append(Kept(torch.empty(5), counting))
    assert counting.step_peak == 60


def test_the_most_that_was_added_in_a_stretch() -> None:
    """At the most, though it may be gone again; the peak of the step stays."""
    counting, _ = meter()
    kept = [Kept(torch.empty(10), counting), Kept(torch.empty(50), counting)]
    del kept[1]
    assert counting.end_stretch().saved == 240
    kept.append(Kept(torch.empty(5), counting))
    del kept[1]
    assert (counting.end_stretch().saved, counting.step_peak) == (20, 240)


def test_parameters_buffers_and_other_devices_do_not_count() -> None:
    counting, stats = meter()
    buffer = torch.empty(10)
    counting.uncounted.add(storage_key(buffer))
    kept = [Kept(buffer[2:], counting), Kept(nn.Parameter(torch.empty(10)), counting)]
    kept.append(Kept(torch.empty(10, device="meta"), counting))  # on another device
    kept.append(Kept(torch.eye(3).to_sparse(), counting))  # no memory of its own
    assert stats.activation_bytes == 0


def test_dropping_and_filling() -> None:
    counting, stats = meter()
    kept = Kept(torch.ones(10), counting)
    kept.drop()
    kept.drop()
    assert stats.activation_bytes == 0
    assert not kept.misses(torch.ones(11))
    assert not kept.misses(torch.ones(10, dtype=torch.float64))
    assert kept.misses(torch.ones(10))
    kept.fill(torch.ones(10), counting)
    assert not kept.misses(torch.ones(10))
    assert stats.activation_bytes == 40
    assert kept.get().sum() == 10
    del kept
    assert stats.activation_bytes == 0


def test_under_auto_only_steps_that_are_measured_count() -> None:
    stats = Stats()
    counting = Meter(RecordingBackend(), stats, always=False)
    before = Kept(torch.empty(10), counting)
    counting.measure([])
    during = Kept(torch.empty(20), counting)
    counting.begin_step()
    after = Kept(torch.empty(30), counting)
    assert stats.activation_bytes == 80
    del before, during, after
    assert stats.activation_bytes == 0
