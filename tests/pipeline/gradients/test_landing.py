"""Memory that gradients come home through: nothing is given away that somebody still reads or holds."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.gradients import landing
from sp_lightning.pipeline.gradients.landing import (
    GradientPiece,
    Pieces,
    Ring,
    Slot,
    TensorsIn,
    gradient_bytes,
    lay_out_gradients,
    norms_in,
    unit_of,
)
from sp_lightning.pipeline.weights.host import HostBuffer
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import DoneTicket, RecordingBackend, place

FLOAT, BF16 = torch.float32, torch.bfloat16


def weights_of(*tensors: Tensor) -> list[Weight]:
    return [Weight(str(index), nn.Parameter(tensor)) for index, tensor in enumerate(tensors)]


# ----------------------------------------------------------------------------------------------------------- tensors in


def test_norms_lie_behind_the_gradients() -> None:
    """One copy brings both: the gradients where they would lie without norms, a number for each after them."""
    weights = weights_of(torch.ones(65), torch.ones(2, 3), torch.ones(1))
    offsets, norms_at, nbytes = lay_out_gradients(weights, [FLOAT, BF16, FLOAT])
    assert (offsets, norms_at, nbytes) == ([0, 512, 768], 1024, 1280)
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    norms = norms_in(memory, norms_at, 3)
    norms.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert memory[norms_at : norms_at + 12].view(FLOAT).tolist() == [1, 2, 3]
    assert not memory[:norms_at].any()


def test_many_norms_take_the_room_they_need() -> None:
    weights = weights_of(*[torch.ones(1)] * 100)
    offsets, norms_at, nbytes = lay_out_gradients(weights, [FLOAT] * 100)
    assert norms_at == offsets[-1] + 256
    assert nbytes == norms_at + 512


def test_memory_is_looked_at_as_gradients() -> None:
    """With the masters' strides, in the dtypes that travel, over the memory itself."""
    weights = weights_of(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(7))
    found = TensorsIn(torch.zeros(1 << 12, dtype=torch.uint8))
    (first, second), norms = found.tensors(weights, [FLOAT, BF16]), found.norms(weights, [FLOAT, BF16])
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
    both = found.tensors(weights, [FLOAT, FLOAT])
    assert found.tensors(weights, [FLOAT, FLOAT]) is both
    assert found.tensors(weights[1:], [FLOAT])[0].data_ptr() == found.memory.data_ptr()
    assert found.tensors(weights, [BF16, FLOAT])[0].dtype is BF16
    assert found.tensors(weights, [FLOAT, FLOAT]) is both


def test_gradients_as_one_tensor() -> None:
    """For one operation on all of them; a change of dtype parts them, and what is empty has no part."""
    weights = weights_of(torch.ones(65), torch.ones(2, 3), torch.ones(0), torch.ones(1), torch.ones(2, 2))
    dtypes = [FLOAT, FLOAT, torch.float64, BF16, BF16]
    found = TensorsIn(torch.zeros(1 << 12, dtype=torch.uint8))
    flat = found.flat(weights, dtypes)
    assert [(tensor.dtype, tensor.nbytes) for tensor in flat] == [(FLOAT, 768), (BF16, 512)]
    for tensor in flat:
        tensor += 1
    assert all(tensor.eq(1).all() for tensor in found.tensors(weights, dtypes))
    assert not found.norms(weights, dtypes).any()


def test_whose_gradients_are_of_one_unit() -> None:
    first, second = place([torch.ones(1)] * 3), place([torch.ones(1)] * 2)
    one, two, three = first.weights
    assert unit_of([one, two, three]) is first.unit
    assert unit_of([one, three]) is first.unit
    assert unit_of([three, one]) is None
    assert unit_of([*first.weights, *second.weights]) is None


def test_pieces_take_turns_when_what_was_in_them_has_left() -> None:
    made = place([torch.ones(3)])
    pieces, backend = Pieces([made.unit], made.backend), made.backend
    first, second = pieces.take(256), pieces.take(256)
    assert pieces.take(256) is first
    second.ticket = DoneTicket()
    assert pieces.take(256) is second
    assert ("wait", second.ticket) in backend.calls  # type: ignore[attr-defined]
    first.ticket = DoneTicket()
    assert pieces.take(2048).memory.nbytes == 2048, "a larger one in its place"
    assert ("wait", first.ticket) in backend.calls  # type: ignore[attr-defined]
    pieces.discard(second)
    assert pieces.take(256) is not second
    assert pieces.nbytes() == 2048 + 512


def test_pieces_are_made_ahead_once_free_memory_is_gathered() -> None:
    """Not in what a large activation has left behind, and will need again."""
    made = place([torch.ones(3)])
    pieces, asked = Pieces([made.unit], made.backend), []
    made.backend.gather_free_memory = lambda: asked.append(pieces.nbytes())  # type: ignore[method-assign]
    pieces.reserve()
    assert asked == [0]
    assert pieces.nbytes() == 2 * gradient_bytes(made.unit)
    first, second = pieces.take(4), pieces.take(4)
    assert first is not second
    pieces.reserve()
    assert asked == [0], "once"


def test_no_pieces_where_nothing_is_trained() -> None:
    made = place([torch.ones(3)])
    for weight in made.weights:
        weight.master.requires_grad_(False)
    pieces = Pieces([made.unit], made.backend)
    pieces.reserve()
    assert pieces.nbytes() == 0


def test_a_piece_lies_on_the_device() -> None:
    """Poisoned when debugging, as all of its memory."""
    piece = GradientPiece(256, RecordingBackend())
    assert piece.memory.view(FLOAT).isnan().all()
    assert piece.ticket is None


# ----------------------------------------------------------------------------------------------------- slots and a ring


@pytest.fixture(autouse=True)
def nothing_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine that runs these tests has."""
    monkeypatch.setattr(landing, "available_host_memory", lambda: None)


def test_who_takes_a_slot_waits_until_one_is_free() -> None:
    """Whichever is free first: the optimizer may come late to the oldest."""
    ring = Ring(RecordingBackend(), pin=False, few=2)
    oldest, newest = ring.take(256), ring.take(256)
    assert not oldest.is_free
    taken: list[Slot] = []
    thread = threading.Thread(target=lambda: taken.append(ring.take(256)))
    thread.start()
    thread.join(0.05)
    assert not taken
    newest.release()
    thread.join(5)
    assert taken == [newest]
    assert not newest.is_free


def test_slots_are_made_as_they_are_needed() -> None:
    """A host that keeps up needs one, whatever the limit."""
    ring = Ring(RecordingBackend(), pin=False, few=5)
    assert ring.nbytes() == 0
    for _ in range(4):
        ring.take(256).release()
    assert ring.nbytes() == 256
    held = [ring.take(256) for _ in range(3)]
    assert len(set(map(id, held))) == 3
    assert ring.nbytes() == 3 * 256


def test_when_all_slots_are_in_use_the_first_to_be_free_is_waited_for() -> None:
    """The host's work is done in order, so the slot that was taken first comes back first."""
    ring = Ring(RecordingBackend(), pin=False, few=2)
    first, second = ring.take(256), ring.take(256)
    for expected in (first, second, first, second):
        got: list[Slot] = []
        thread = threading.Thread(target=lambda got=got: got.append(ring.take(256)))  # type: ignore[misc]
        thread.start()
        thread.join(0.03)
        assert got == [], "a slot was given away that is in use"
        expected.release()
        thread.join(5)
        assert got == [expected]
    assert ring.nbytes() == 2 * 256


def test_a_free_slot_is_not_waited_for() -> None:
    """Even if another one was taken earlier."""
    ring = Ring(RecordingBackend(), pin=False, few=2)
    _, second = ring.take(256), ring.take(256)
    second.release()
    assert ring.take(256) is second


def test_a_slot_that_is_too_small_is_replaced() -> None:
    """Units have unequal sizes; the page-lock of the old memory is undone, and there are not more slots for it."""
    backend = RecordingBackend(can_pin=True)
    ring = Ring(backend, pin=True, few=2)
    small = ring.take(256)
    small.release()
    large = ring.take(1024)
    assert large is not small
    assert large.memory.nbytes == 1024 == ring.nbytes()
    assert backend.pinned == {large.memory.data_ptr()}
    assert not large.is_free
    large.release()
    assert ring.take(512) is large


def test_a_slot_that_is_too_small_and_in_use_is_waited_for() -> None:
    ring = Ring(RecordingBackend(), pin=False, few=1)
    small = ring.take(256)
    got: list[Slot] = []
    thread = threading.Thread(target=lambda: got.append(ring.take(512)))
    thread.start()
    thread.join(0.03)
    assert got == []
    small.release()
    thread.join(5)
    assert got[0].memory.nbytes == 512


@pytest.mark.parametrize(
    ("free", "total", "made"), [(1000, 2000, 3), (455, 2000, 2), (456, 2000, 3), (None, 2000, 2), (1000, None, 2)]
)
def test_there_are_more_slots_than_a_few_if_the_host_has_memory_to_spare(
    free: int | None, total: int | None, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the host's memory stays free; where it is not known, there are a few."""
    monkeypatch.setattr(landing, "available_host_memory", lambda: free)
    monkeypatch.setattr(landing, "total_host_memory", lambda: total)
    ring = Ring(RecordingBackend(), pin=False, few=2)
    oldest, _ = ring.take(256), ring.take(256)
    taken: list[Slot] = []
    thread = threading.Thread(target=lambda: taken.append(ring.take(256)))
    thread.start()
    thread.join(0.03)
    assert len(taken) == made - 2
    oldest.release()
    thread.join(5)
    assert ring.nbytes() == made * 256


def test_who_is_patient_waits_also_where_there_is_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "_is_left_over", lambda nbytes: True)
    ring = Ring(RecordingBackend(), pin=False, few=1)
    slot = ring.take(256)
    taken: list[Slot] = []
    thread = threading.Thread(target=lambda: taken.append(ring.take(256, patient=True)))
    thread.start()
    thread.join(0.03)
    assert taken == []
    slot.release()
    thread.join(5)
    assert taken == [slot]


def test_the_smallest_slot_that_is_large_enough_is_taken() -> None:
    """A large one is kept for what needs it, or in time all would be large."""
    ring = Ring(RecordingBackend(), pin=False, few=3)
    large, small = ring.take(1024), ring.take(256)
    large.release()
    small.release()
    assert ring.take(256) is small
    assert ring.take(512) is large


def test_of_slots_that_are_too_small_the_largest_is_replaced() -> None:
    ring = Ring(RecordingBackend(), pin=False, few=2)
    medium, small = ring.take(512), ring.take(256)
    medium.release()
    small.release()
    large = ring.take(1024)
    assert ring.nbytes() == 1024 + 256
    assert ring.take(256) is small
    assert not large.is_free


def test_memory_is_taken_over_only_if_a_slot_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking other memory for it would take time."""
    backend = RecordingBackend(can_pin=True)
    ring = Ring(backend, pin=True, few=1)
    first, second, third = (HostBuffer(256, backend, pin=True) for _ in range(3))
    ring.take_over(first)
    ring.take_over(second)  # the first is free
    assert backend.pinned == {first.bytes.data_ptr(), third.bytes.data_ptr()}
    assert ring.take(256).buffer is first
    ring.take_over(third)  # all are in use, but there is only memory for a few
    assert backend.pinned == {first.bytes.data_ptr()}
    monkeypatch.setattr(landing, "_is_left_over", lambda nbytes: nbytes == 0)
    third.pin()
    ring.take_over(third)
    assert ring.take(256).buffer is third
    assert ring.nbytes() == 512


def test_after_an_exception_all_slots_are_free() -> None:
    ring = Ring(RecordingBackend(), pin=False, few=2)
    held = [ring.take(256), ring.take(256)]
    ring.release_all()
    assert all(slot.is_free for slot in held)
    ring.take(256)


def test_closing_a_ring_undoes_page_locks() -> None:
    backend = RecordingBackend(can_pin=True)
    ring = Ring(backend, pin=True, few=3)
    for _ in range(2):
        ring.take(256)
    assert len(backend.pinned) == 2
    ring.close()
    assert not backend.pinned
