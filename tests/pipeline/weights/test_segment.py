"""Segments: where masters lie, what is sent of them, and how changes of masters are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.weights.buffers import tensor_in
from sp_lightning.pipeline.weights.segment import HostMemory, Segment
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import RecordingBackend


def segment_of(*tensors: Tensor, lowered: torch.dtype | None = None) -> Segment:
    weights = [Weight(str(number), nn.Parameter(tensor)) for number, tensor in enumerate(tensors)]
    for weight in weights:
        weight.compute_dtype = lowered or weight.dtype
    return HostMemory(RecordingBackend(pins=True), None).segment(weights)


def sent(segment: Segment, number: int) -> Tensor:
    """What would arrive of a weight."""
    segment.refresh_copies()
    segment.place = torch.zeros(segment.nbytes, dtype=torch.uint8)
    for place, source in segment.pieces():
        place.copy_(source)
    segment.lying = segment.epoch
    weight = segment.weights[number]
    return tensor_in(segment.place, segment.offsets[number], weight.layout, weight.compute_dtype)


def test_lowered_weights_are_sent_as_copies() -> None:
    """Which are pinned instead of the masters."""
    segment = segment_of(torch.randn(70), torch.randn(3), lowered=torch.bfloat16)
    assert segment.sends_copies
    assert (segment.memory.pinned, segment.source.pinned) == (False, True)
    assert torch.equal(sent(segment, 0), segment.weights[0].master.detach().bfloat16())


def test_an_average_that_is_swapped_in_leaves_the_weights_as_they_are() -> None:
    """`backup = p.data; p.data = average; ...; p.data = backup`."""
    segment = segment_of(torch.ones(5))
    master = segment.weights[0].master
    backup = master.data
    master.data = torch.full((5,), 2.0)
    segment.check()
    assert torch.equal(sent(segment, 0), torch.full((5,), 2.0))
    assert torch.equal(backup, torch.ones(5))
    master.data = backup
    segment.check()
    assert torch.equal(sent(segment, 0), torch.ones(5))
    assert len(segment.pieces()) == 1


def test_a_conversion_in_a_step_is_an_error() -> None:
    segment = segment_of(torch.ones(5))
    segment.weights[0].master.data = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Convert the module between steps"):
        segment.check()
