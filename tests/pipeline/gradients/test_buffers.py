"""Memory that gradients come home through: nothing is given away that somebody still reads or holds."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.gradients import buffers as gradient_buffers
from sp_lightning.pipeline.gradients.buffers import (
    LandingBuffer,
    LandingBuffers,
    StagingBuffer,
    StagingBuffers,
    TensorsIn,
    gradient_bytes,
    unit_of,
)
from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import DoneTicket, RecordingBackend, place

FLOAT, BF16 = torch.float32, torch.bfloat16


def weights_of(*tensors: Tensor) -> tuple[Weight, ...]:
    return tuple(Weight(str(index), nn.Parameter(tensor)) for index, tensor in enumerate(tensors))


# ----------------------------------------------------------------------------------------------------------- tensors in


def test_norms_lie_behind_the_gradients() -> None:
    """One copy brings both: the gradients where they would lie without norms, a number for each after them."""
    weights = weights_of(torch.ones(65), torch.ones(2, 3), torch.ones(1))
    layout = GradientLayout(weights, (FLOAT, BF16, FLOAT))
    assert (layout.offsets, layout.norms_at, layout.nbytes) == ([0, 512, 768], 1024, 1280)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    norms = layout.norms_in(memory)
    norms.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert memory[layout.norms_at : layout.norms_at + 12].view(FLOAT).tolist() == [1, 2, 3]
    assert not memory[: layout.norms_at].any()


def test_many_norms_take_the_room_they_need() -> None:
    weights = weights_of(*[torch.ones(1)] * 100)
    layout = GradientLayout(weights, (FLOAT,) * 100)
    assert layout.norms_at == layout.offsets[-1] + 256
    assert layout.nbytes == layout.norms_at + 512


def test_memory_viewed_as_gradients() -> None:
    """With the masters' strides, in the dtypes that travel, over the memory itself."""
    weights = weights_of(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(7))
    found = TensorsIn(torch.zeros(1 << 12, dtype=torch.uint8))
    layout = GradientLayout(weights, (FLOAT, BF16))
    (first, second), norms = found.tensors(layout), found.norms(layout)
    assert first.stride() == weights[0].master.stride()
    assert (first.dtype, second.dtype, norms.dtype) == (FLOAT, BF16, FLOAT)
    assert first.data_ptr() == found.memory.data_ptr()
    assert (first.shape, second.shape, norms.shape) == ((2, 3, 4, 5), (7,), (2,))
    second.fill_(1)
    assert found.memory[512:526].view(BF16).eq(1).all()


def test_tensors_are_made_once_for_each_set_of_gradients() -> None:
    """Making them costs more than the copy of a small unit."""
    weights = weights_of(torch.ones(3), torch.ones(3))
    found = TensorsIn(torch.zeros(1 << 12, dtype=torch.uint8))
    both = found.tensors(GradientLayout(weights, (FLOAT, FLOAT)))
    assert found.tensors(GradientLayout(weights, (FLOAT, FLOAT))) is both
    assert found.tensors(GradientLayout(weights[1:], (FLOAT,)))[0].data_ptr() == found.memory.data_ptr()
    assert found.tensors(GradientLayout(weights, (BF16, FLOAT)))[0].dtype is BF16
    assert found.tensors(GradientLayout(weights, (FLOAT, FLOAT))) is both


def test_gradients_as_one_tensor() -> None:
    """For one operation on all of them; a change of dtype parts them, and what is empty has no part."""
    weights = weights_of(torch.ones(65), torch.ones(2, 3), torch.ones(0), torch.ones(1), torch.ones(2, 2))
    layout = GradientLayout(weights, (FLOAT, FLOAT, torch.float64, BF16, BF16))
    found = TensorsIn(torch.zeros(1 << 12, dtype=torch.uint8))
    flat = layout.flat_in(found.memory)
    assert [(tensor.dtype, tensor.nbytes) for tensor in flat] == [(FLOAT, 768), (BF16, 512)]
    for tensor in flat:
        tensor += 1
    assert all(tensor.eq(1).all() for tensor in found.tensors(layout))
    assert not found.norms(layout).any()


def test_weights_of_one_unit() -> None:
    first, second = place([torch.ones(1)] * 3), place([torch.ones(1)] * 2)
    one, two, three = first.weights
    assert unit_of([one, two, three]) is first.unit
    assert unit_of([one, three]) is first.unit
    assert unit_of([three, one]) is None
    assert unit_of([*first.weights, *second.weights]) is None


def test_a_staging_buffer_is_reused_after_its_copy() -> None:
    made = place([torch.ones(3)])
    staging, backend = StagingBuffers([made.unit], made.backend), made.backend
    first, second = staging.take(256), staging.take(256)
    assert staging.take(256) is first
    second.ticket = DoneTicket()
    assert staging.take(256) is second
    assert ("wait", second.ticket) in backend.calls  # type: ignore[attr-defined]
    first.ticket = DoneTicket()
    assert staging.take(2048).memory.nbytes == 2048, "a larger one in its place"
    assert ("wait", first.ticket) in backend.calls  # type: ignore[attr-defined]
    staging.discard(second)
    assert staging.take(256) is not second
    assert staging.nbytes() == 2048 + 512


def test_staging_buffers_are_made_ahead_once_free_memory_is_gathered() -> None:
    """Not in what a large activation has left behind, and will need again."""
    made = place([torch.ones(3)])
    staging, asked = StagingBuffers([made.unit], made.backend), []
    made.backend.gather_free_memory = lambda: asked.append(staging.nbytes())  # type: ignore[method-assign]
    staging.reserve()
    assert asked == [0]
    assert staging.nbytes() == 2 * gradient_bytes(made.unit)
    first, second = staging.take(4), staging.take(4)
    assert first is not second
    staging.reserve()
    assert asked == [0], "once"


def test_no_staging_buffers_where_nothing_is_trained() -> None:
    made = place([torch.ones(3)])
    for weight in made.weights:
        weight.master.requires_grad_(False)
    staging = StagingBuffers([made.unit], made.backend)
    staging.reserve()
    assert staging.nbytes() == 0


def test_a_staging_buffer_lies_on_the_device() -> None:
    """Poisoned when debugging, as all of its memory."""
    staging = StagingBuffer(256, RecordingBackend())
    assert staging.memory.view(FLOAT).isnan().all()
    assert staging.ticket is None


# ----------------------------------------------------------------------------------------------------- landing buffers


@pytest.fixture(autouse=True)
def nothing_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine that runs these tests has."""
    monkeypatch.setattr(gradient_buffers, "available_host_memory", lambda: None)


def test_taking_a_buffer_waits_until_one_is_free() -> None:
    """Whichever is free first: the optimizer may come late to the oldest."""
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    oldest, newest = buffers.take(256), buffers.take(256)
    assert not oldest.is_free
    taken: list[LandingBuffer] = []
    thread = threading.Thread(target=lambda: taken.append(buffers.take(256)))
    thread.start()
    thread.join(0.05)
    assert not taken
    newest.release()
    thread.join(5)
    assert taken == [newest]
    assert not newest.is_free


def test_buffers_are_made_as_they_are_needed() -> None:
    """A host that keeps up needs one, whatever the limit."""
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=5)
    assert buffers.nbytes() == 0
    for _ in range(4):
        buffers.take(256).release()
    assert buffers.nbytes() == 256
    held = [buffers.take(256) for _ in range(3)]
    assert len(set(map(id, held))) == 3
    assert buffers.nbytes() == 3 * 256


def test_when_all_buffers_are_in_use_the_first_to_be_free_is_waited_for() -> None:
    """The host's work is done in order, so the buffer that was taken first comes back first."""
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    first, second = buffers.take(256), buffers.take(256)
    for expected in (first, second, first, second):
        got: list[LandingBuffer] = []
        thread = threading.Thread(target=lambda got=got: got.append(buffers.take(256)))  # type: ignore[misc]
        thread.start()
        thread.join(0.03)
        assert got == [], "a buffer was given away that is in use"
        expected.release()
        thread.join(5)
        assert got == [expected]
    assert buffers.nbytes() == 2 * 256


def test_a_free_buffer_is_not_waited_for() -> None:
    """Even if another one was taken earlier."""
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    _, second = buffers.take(256), buffers.take(256)
    second.release()
    assert buffers.take(256) is second


def test_a_buffer_that_is_too_small_is_replaced() -> None:
    """Units have unequal sizes; the page-lock of the old memory is undone, and there are not more buffers for it."""
    backend = RecordingBackend(can_pin=True)
    buffers = LandingBuffers(backend, pin=True, few=2)
    small = buffers.take(256)
    small.release()
    large = buffers.take(1024)
    assert large is not small
    assert large.memory.nbytes == 1024 == buffers.nbytes()
    assert backend.pinned == {large.memory.data_ptr()}
    assert not large.is_free
    large.release()
    assert buffers.take(512) is large


def test_a_buffer_that_is_too_small_and_in_use_is_waited_for() -> None:
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=1)
    small = buffers.take(256)
    got: list[LandingBuffer] = []
    thread = threading.Thread(target=lambda: got.append(buffers.take(512)))
    thread.start()
    thread.join(0.03)
    assert got == []
    small.release()
    thread.join(5)
    assert got[0].memory.nbytes == 512


@pytest.mark.parametrize(
    ("free", "total", "made"), [(1000, 2000, 3), (455, 2000, 2), (456, 2000, 3), (None, 2000, 2), (1000, None, 2)]
)
def test_there_are_more_buffers_than_a_few_if_the_host_has_memory_to_spare(
    free: int | None, total: int | None, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the host's memory stays free; where it is not known, there are a few."""
    monkeypatch.setattr(gradient_buffers, "available_host_memory", lambda: free)
    monkeypatch.setattr(gradient_buffers, "total_host_memory", lambda: total)
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    oldest, _ = buffers.take(256), buffers.take(256)
    taken: list[LandingBuffer] = []
    thread = threading.Thread(target=lambda: taken.append(buffers.take(256)))
    thread.start()
    thread.join(0.03)
    assert len(taken) == made - 2
    oldest.release()
    thread.join(5)
    assert buffers.nbytes() == made * 256


def test_a_patient_taker_waits_even_with_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buffers, "_is_left_over", lambda nbytes: True)
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=1)
    buffer = buffers.take(256)
    taken: list[LandingBuffer] = []
    thread = threading.Thread(target=lambda: taken.append(buffers.take(256, patient=True)))
    thread.start()
    thread.join(0.03)
    assert taken == []
    buffer.release()
    thread.join(5)
    assert taken == [buffer]


def test_the_smallest_buffer_that_is_large_enough_is_taken() -> None:
    """A large one is kept for what needs it, or in time all would be large."""
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=3)
    large, small = buffers.take(1024), buffers.take(256)
    large.release()
    small.release()
    assert buffers.take(256) is small
    assert buffers.take(512) is large


def test_of_buffers_that_are_too_small_the_largest_is_replaced() -> None:
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    medium, small = buffers.take(512), buffers.take(256)
    medium.release()
    small.release()
    large = buffers.take(1024)
    assert buffers.nbytes() == 1024 + 256
    assert buffers.take(256) is small
    assert not large.is_free


def test_memory_is_taken_over_only_if_a_buffer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking other memory for it would take time."""
    backend = RecordingBackend(can_pin=True)
    buffers = LandingBuffers(backend, pin=True, few=1)
    first, second, third = (HostBuffer(256, backend, pin=True) for _ in range(3))
    buffers.take_over(first)
    buffers.take_over(second)  # the first is free
    assert backend.pinned == {first.bytes.data_ptr(), third.bytes.data_ptr()}
    assert buffers.take(256).host is first
    buffers.take_over(third)  # all are in use, but there is only memory for a few
    assert backend.pinned == {first.bytes.data_ptr()}
    monkeypatch.setattr(gradient_buffers, "_is_left_over", lambda nbytes: nbytes == 0)
    fourth = HostBuffer(256, backend, pin=True)
    buffers.take_over(fourth)
    assert buffers.take(256).host is fourth
    assert buffers.nbytes() == 512


def test_after_an_exception_all_buffers_are_free() -> None:
    buffers = LandingBuffers(RecordingBackend(), pin=False, few=2)
    held = [buffers.take(256), buffers.take(256)]
    buffers.abandon()
    assert all(buffer.is_free for buffer in held)
    buffers.take(256)


def test_closing_landing_buffers_undoes_page_locks() -> None:
    backend = RecordingBackend(can_pin=True)
    buffers = LandingBuffers(backend, pin=True, few=3)
    for _ in range(2):
        buffers.take(256)
    assert len(backend.pinned) == 2
    buffers.release()
    assert not backend.pinned
