"""The host side of a group: one storage per weight, and every change of a master noticed."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.weights import host
from sp_lightning.pipeline.weights.buffers import as_bytes, tensor_in
from sp_lightning.pipeline.weights.host import GroupHost
from sp_lightning.pipeline.weights.master_memory import MasterMemory
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import RecordingBackend


def group_of(*tensors: Tensor, lowered: torch.dtype | None = None) -> GroupHost:
    """A group of weights with these values; `lowered` is the dtype they are sent in."""
    weights = [Weight(str(index), nn.Parameter(tensor)) for index, tensor in enumerate(tensors)]
    for weight in weights:
        weight.compute_dtype = lowered or weight.compute_dtype
    return GroupHost(weights, RecordingBackend(), pin=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 3),
        lambda: torch.randn(3, 5).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(7, dtype=torch.bfloat16),
        lambda: torch.randn(3, dtype=torch.complex64),
        lambda: torch.randn(()),
        lambda: torch.zeros(0, 4),
    ],
)
def test_masters_keep_values_strides_and_identity(make: Callable[[], Tensor]) -> None:
    """The Parameter object, its values and its strides stay, only the memory is another."""
    before = make()
    parameter = nn.Parameter(before.clone(memory_format=torch.preserve_format))
    group = GroupHost([Weight("w", parameter)], RecordingBackend(), pin=False)
    assert torch.equal(parameter, before)
    assert parameter.stride() == before.stride()
    assert group.weights[0].master is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    if parameter.numel():
        assert parameter.data_ptr() == group.source.bytes.data_ptr()


def test_every_master_has_a_storage_of_its_own() -> None:
    """A view of the buffer would drag all of it into `torch.save` and look tied to safetensors."""
    group = group_of(torch.randn(300), torch.randn(2), torch.randn(40, 40))
    masters = [weight.master for weight in group.weights]
    assert [m.untyped_storage().nbytes() for m in masters] == [m.nbytes for m in masters]
    assert len({m.untyped_storage().data_ptr() for m in masters}) == 3
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(masters[1].detach(), file)
    torch.save(torch.randn(2), plain)
    assert len(file.getvalue()) == len(plain.getvalue())


def test_versions_of_masters_are_their_own() -> None:
    """One version counter for the buffer would let a change of one weight look like a change of all."""
    group = group_of(torch.randn(3), torch.randn(3))
    with torch.no_grad():
        group.weights[0].master.add_(1)
    assert [weight.master._version for weight in group.weights] == [1, 0]


def test_masters_are_sent_without_a_copy() -> None:
    """No second copy of the model where nothing is lowered; one contiguous piece."""
    group = group_of(torch.arange(3.0), torch.arange(5.0))
    source = group.prepare(group.state())
    assert source.data_ptr() == group.weights[0].master.data_ptr()
    assert source.nbytes == 512 == group.host_bytes()
    assert torch.equal(tensor_in(source, 256, torch.empty(5), torch.float32), torch.arange(5.0))


def test_tensors_in_memory_made_under_inference_mode_can_train() -> None:
    """Lightning's sanity check comes first, under inference mode."""
    with torch.inference_mode():
        group = group_of(torch.randn(4))
        data = tensor_in(group.source.bytes, 0, torch.empty(4), torch.float32)
    assert not data.is_inference()
    assert not group.weights[0].host.is_inference()
    assert not as_bytes(data).is_inference()


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def copy_data(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.data + 1)


def one_row(tensor: Tensor) -> None:
    tensor.data[-1] += 1


def new_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


@pytest.mark.parametrize("lowered", [None, torch.bfloat16])
@pytest.mark.parametrize("edit", [write, copy_data, one_row, new_memory])
@pytest.mark.parametrize(
    "shape",
    [(40, 30), (500, 3), (64, 3, 3, 3), (7,), (1,), (1, 1000), (200, 1)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_every_edit_of_a_master_is_noticed_and_sent(
    shape: tuple[int, ...], edit: Callable[[Tensor], None], lowered: torch.dtype | None
) -> None:
    """`.data` edits do not move the version counter: a sample of the bytes tells, down to a single row."""
    group = group_of(torch.randn(9, 9), torch.randn(*shape), lowered=lowered)
    state = group.state()
    group.prepare(state)
    assert not group.has_changed(state)
    master = group.weights[1].master
    edit(master)
    assert group.has_changed(state)
    after = group.state()
    source = group.prepare(after)
    assert not group.has_changed(after)
    sent = tensor_in(source, group.source_offsets[1], master, lowered or torch.float32)
    assert torch.equal(sent, master.detach().to(sent.dtype))


def test_a_write_to_a_single_element_is_noticed() -> None:
    """The version counter sees what a sample of the bytes can miss."""
    group = group_of(torch.randn(100, 100))
    for column in range(20):
        state = group.state()
        with torch.no_grad():
            group.weights[0].master[50, column] += 1
        assert group.has_changed(state)


@pytest.mark.parametrize("lowered", [None, torch.bfloat16], ids=str)
def test_other_memory_with_a_single_element_changed_is_noticed(lowered: torch.dtype | None) -> None:
    """Whoever takes its values back, and whether or not a sample shows them."""
    group = group_of(torch.randn(100, 100), lowered=lowered)
    weight = group.weights[0]
    for column in range(20):
        state = group.state()
        group.prepare(state)
        other = weight.master.detach().clone()
        other[50, column] += 1
        weight.master.data = other
        if column % 2:
            weight.readopt()
        assert group.has_changed(state)
        after = group.state()
        sent = tensor_in(group.prepare(after), 0, weight.master, lowered or torch.float32)
        assert torch.equal(sent, other.to(sent.dtype))
        assert not group.has_changed(after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_edits_of_the_smallest_weights_are_noticed(dtype: torch.dtype, count: int) -> None:
    """A gate or temperature of one element under bf16-true is smaller than what the sample compares at once."""
    parameter = nn.Parameter(torch.ones(count, dtype=dtype), requires_grad=False)
    group = GroupHost([Weight("w", parameter)], RecordingBackend(), pin=False)
    state = group.state()
    parameter.data.mul_(2)
    assert group.has_changed(state)


@pytest.mark.parametrize("row", range(0, 100, 10))
def test_one_row_of_a_transposed_weight_is_noticed(row: int) -> None:
    """No row changes unseen, whichever way a weight lies in memory."""
    group = group_of(torch.randn(100, 100).t())
    state = group.state()
    group.weights[0].master.data[row] += 1
    assert group.has_changed(state)


@pytest.mark.parametrize(
    ("dtype", "edit"),
    [
        (torch.complex64, lambda tensor: tensor.imag.add_(1)),
        (torch.complex64, lambda tensor: tensor.real.add_(1)),
        (torch.float64, lambda tensor: tensor.mul_(2)),
        (torch.float64, lambda tensor: tensor.mul_(1 + 2**-50)),
    ],
    ids=["imaginary", "real", "exponent", "last-bits"],
)
def test_all_of_an_element_is_looked_at(dtype: torch.dtype, edit: Callable[[Tensor], object]) -> None:
    """Elements of eight bytes have an upper and a lower half."""
    group = group_of(torch.ones(20, 20, dtype=dtype))
    state = group.state()
    edit(group.weights[0].master.data)
    assert group.has_changed(state)


@pytest.mark.parametrize("rows", [slice(0, 5000), slice(70_000, 75_000), slice(135_000, None)], ids=str)
def test_very_tall_weights_are_looked_at_everywhere(rows: slice) -> None:
    """An embedding of more rows than samples are taken: they are spread over all of it, to the last tokens."""
    group = group_of(torch.zeros(140_000, 1))
    state = group.state()
    group.weights[0].master.data[rows] = 1
    assert group.has_changed(state)


def test_other_memory_is_taken_back() -> None:
    """After `p.data = ...` the master lies in the group's buffer again, with the new values."""
    group = group_of(torch.zeros(4), torch.zeros(4))
    master, home = group.weights[1].master, group.weights[1].host.data_ptr()
    master.data = torch.arange(4.0)
    group.state()
    assert master.data_ptr() == home == group.weights[1].host.data_ptr()
    assert master.tolist() == [0, 1, 2, 3]


def test_lowered_copies_are_written_once_per_change() -> None:
    """Accumulation micro-steps must not pay for a cast of the model."""
    group = group_of(torch.randn(8), lowered=torch.bfloat16)
    assert group.sends_copies
    state = group.state()
    source = group.prepare(state)
    source.zero_()
    assert group.prepare(state).sum() == 0, "written although nothing changed"
    write(group.weights[0].master)
    assert group.prepare(group.state()).sum() != 0
    assert group.host_bytes() == 512


def with_adapters() -> list[Weight]:
    """A frozen base, sent as it is, and adapters around it that are lowered."""
    base = [Weight(f"base {n}", nn.Parameter(torch.randn(64, 64), requires_grad=False)) for n in range(2)]
    adapters = [Weight(f"adapter {n}", nn.Parameter(torch.randn(64, 2))) for n in range(2)]
    for weight in adapters:
        weight.compute_dtype = torch.bfloat16
    return [adapters[0], base[0], adapters[1], base[1]]


def sent_of(group: GroupHost, index: int) -> Tensor:
    """What the group sends of a weight now."""
    weight = group.weights[index]
    source = group.prepare(group.state())
    return tensor_in(source, group.source_offsets[index], weight.master, weight.compute_dtype)


def test_a_frozen_base_under_adapters_is_sent_without_a_copy() -> None:
    """Otherwise it would take host memory twice."""
    group = GroupHost(with_adapters(), RecordingBackend(), pin=False)
    assert [copy is None for copy in group.copies()] == [False, True, False, True]
    assert group.host_bytes() == 2 * (64 * 64 * 4) + 2 * (64 * 2 * 4) + 2 * (64 * 2 * 2)
    for index, weight in enumerate(group.weights):
        assert torch.equal(sent_of(group, index), weight.master.detach().to(weight.compute_dtype))


@pytest.mark.parametrize("edit", [write, copy_data, one_row, new_memory])
@pytest.mark.parametrize("index", range(4))
def test_a_change_of_either_is_noticed_and_sent(index: int, edit: Callable[[Tensor], None]) -> None:
    group = GroupHost(with_adapters(), RecordingBackend(), pin=False)
    weight = group.weights[index]
    state = group.state()
    edit(weight.master)
    assert group.has_changed(state)
    assert torch.equal(sent_of(group, index), weight.master.detach().to(weight.compute_dtype))


def ranges_of(group: GroupHost, *changed: int) -> list[tuple[int, int]]:
    """Where weights begin and end in what is sent."""
    ends = [*group.source_offsets[1:], group.source.nbytes]
    return [(group.source_offsets[index], ends[index]) for index in changed]


@pytest.fixture
def _no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest gap is worth another copy."""
    monkeypatch.setattr(host, "_GAP", 0)


@pytest.mark.usefixtures("_no_gap")
@pytest.mark.parametrize("edit", [write, copy_data, one_row])
def test_what_was_stepped_or_changed_is_what_is_sent(edit: Callable[[Tensor], None]) -> None:
    group = GroupHost(with_adapters(), RecordingBackend(), pin=False)
    before = group.state()
    edit(group.weights[2].master)
    for now in (group.state(), None):
        assert group.changed_ranges(before, now, [group.weights[0]]) == ranges_of(group, 0, 2)
        assert group.changed_ranges(before, now, []) == ranges_of(group, 2)
    assert group.changed_ranges(group.state(), None, []) == []


def test_what_lies_side_by_side_is_sent_in_one_copy() -> None:
    group = group_of(*(torch.randn(64) for _ in range(9)))
    (first,), (second,) = ranges_of(group, 3), ranges_of(group, 4)
    stepped = [group.weights[3], group.weights[4]]
    assert group.changed_ranges(group.state(), None, stepped) == [(first[0], second[1])]


def test_a_small_gap_is_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(*(torch.randn(64) for _ in range(9)))
    first, second = ranges_of(group, 3, 5)
    stepped = [group.weights[3], group.weights[5]]
    assert group.changed_ranges(group.state(), None, stepped) == [(first[0], second[1])]
    monkeypatch.setattr(host, "_GAP", 0)
    assert group.changed_ranges(group.state(), None, stepped) == [first, second]


@pytest.mark.usefixtures("_no_gap")
def test_all_is_sent_if_that_is_little_more() -> None:
    """Or if it would take many copies, or nobody knows what has changed."""
    group = group_of(*(torch.randn(64) for _ in range(80)))
    everything = [(0, group.source.nbytes)]
    state = group.state()
    assert group.changed_ranges(state, None, group.weights[:41]) == everything
    assert [group.are_little(group.weights[:count]) for count in (40, 41)] == [True, False]
    assert len(group.changed_ranges(state, None, group.weights[:40])) == 1
    assert group.changed_ranges(state, None, group.weights[::3]) == everything
    new_memory(group.weights[0].master)
    assert group.changed_ranges(state, None, []) == everything


def test_where_most_is_lowered_all_is_copied() -> None:
    """So that no master moves when autocast is first seen."""
    weights = [Weight(str(rows), nn.Parameter(torch.randn(rows, 64))) for rows in (64, 1)]
    memory, backend = MasterMemory(), RecordingBackend()
    memory.keep(GroupHost(weights, backend, pin=False).rooms, backend)
    before = [weight.master.data_ptr() for weight in weights]
    weights[0].compute_dtype = torch.bfloat16
    group = GroupHost(weights, backend, False, memory)
    assert [weight.master.data_ptr() for weight in weights] == before
    assert None not in group.copies()


def test_adapters_and_their_base_do_not_move_again() -> None:
    """Another arrangement, with the same weights lowered, finds both where they are; what they have left is free."""
    weights, memory, backend = with_adapters(), MasterMemory(), RecordingBackend()
    lowered = [weight.compute_dtype for weight in weights]
    for weight in weights:
        weight.compute_dtype = weight.master.dtype
    first = GroupHost(weights, backend, pin=True)
    memory.keep(first.rooms, backend)
    for weight, dtype in zip(weights, lowered, strict=True):
        weight.compute_dtype = dtype
    second = GroupHost(weights, backend, True, memory)
    memory.keep(second.rooms, backend)
    assert not first.source.pinned
    assert not first.source.bytes.nbytes
    where = [weight.master.data_ptr() for weight in weights]
    third = GroupHost(weights, backend, True, memory)
    memory.keep(third.rooms, backend)
    assert third.source is second.source
    assert third.source.pinned
    assert [weight.master.data_ptr() for weight in weights] == where


def test_a_buffer_of_an_earlier_arrangement_is_used_again() -> None:
    """Taking in what was learned copies no model."""
    weights, memory, backend = [Weight("w", nn.Parameter(torch.randn(6)))], MasterMemory(), RecordingBackend()
    first = GroupHost(weights, backend, pin=True)
    memory.keep(first.rooms, backend)
    address = weights[0].master.data_ptr()
    again = GroupHost(weights, backend, True, memory)
    assert again.source is first.source
    assert weights[0].master.data_ptr() == address
    assert again.source.pinned


def test_masters_that_are_not_sent_are_not_page_locked() -> None:
    """Where a copy is what is sent, page-locking the masters would be waste."""
    weight, memory, backend = Weight("w", nn.Parameter(torch.randn(6))), MasterMemory(), RecordingBackend()
    first = GroupHost([weight], backend, pin=True)
    memory.keep(first.rooms, backend)
    weight.compute_dtype = torch.bfloat16
    lowered = GroupHost([weight], backend, True, memory)
    assert not first.source.pinned
    assert lowered.source.pinned
