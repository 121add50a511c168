"""Neighbors in memory, and state that is laid out as its weights are."""

from __future__ import annotations

from mmap import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.optimizer.flat import FlatState, flat, side_by_side
from sp_lightning.pipeline.weights.buffers import tensor_in


def in_a_row(*sizes: int, gap: int = 0) -> list[Tensor]:
    """Tensors of so many floats in one buffer, with so many bytes between them."""
    memory = torch.zeros(sum(sizes) * 4 + gap * len(sizes), dtype=torch.uint8)
    tensors, offset = [], 0
    for size in sizes:
        tensors.append(tensor_in(memory, offset, torch.empty(size), torch.float32))
        offset += size * 4 + gap
    return tensors


def test_neighbors() -> None:
    a, b, c = in_a_row(64, 5, 3)
    assert side_by_side([a, b, c])
    assert side_by_side([a])
    assert not side_by_side([a, c])
    assert not side_by_side([b, a])
    assert not side_by_side([a, b.view(torch.int32)])
    assert not side_by_side(in_a_row(64, 64, gap=4))


def test_a_flat_tensor_is_all_of_them() -> None:
    """And nothing else: what lies before and after them stays as it is."""
    before, a, b, after = in_a_row(3, 4, 5, 6)
    whole = flat([a, b])
    assert whole.shape == (9,)
    whole.copy_(torch.arange(1.0, 10))
    assert a.tolist() == [1, 2, 3, 4]
    assert b.tolist() == [5, 6, 7, 8, 9]
    assert before.abs().sum() == after.abs().sum() == 0


def test_a_flat_tensor_of_half_precision_in_other_strides() -> None:
    weight = torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)
    whole = flat([weight])
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole, weight.permute(0, 2, 3, 1).reshape(-1))


def test_state_lies_as_the_weights_do() -> None:
    masters = [master.view(8, -1) for master in in_a_row(64, 128, 64)]
    state = FlatState(masters)
    averages = [state.place(index, "average", masters[index]) for index in range(3)]
    steps = [state.place(index, "step", torch.tensor(0.0)) for index in range(3)]
    assert side_by_side(averages)
    assert side_by_side(steps)
    assert [tensor.shape for tensor in averages] == [master.shape for master in masters]
    assert [tensor.shape for tensor in steps] == [()] * 3
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in averages + steps)
    assert state.place(1, "average", masters[1]) is averages[1]


def test_an_empty_weight_does_not_part_its_neighbors() -> None:
    masters = in_a_row(64, 0, 64)
    state = FlatState(masters)
    for like in (masters[0], torch.tensor(0.0)):
        left, right = (state.place(index, f"{like.dim()}", like) for index in (0, 2))
        assert side_by_side([left, right])


def test_strangers_share_no_buffer() -> None:
    masters = in_a_row(64, 64, gap=256)
    state = FlatState(masters)
    left, right = (state.place(index, "average", masters[index]) for index in range(2))
    assert not side_by_side([left, right])


def test_each_kind_and_dtype_has_memory_of_its_own() -> None:
    masters = in_a_row(64)
    state = FlatState(masters)
    places = [
        state.place(0, "average", masters[0]),
        state.place(0, "square", masters[0]),
        state.place(0, "square", masters[0].double()),
    ]
    for number, place in enumerate(places):
        place.fill_(number)
    assert [place.mean().item() for place in places] == [0, 1, 2]
    assert [place.dtype for place in places] == [torch.float32, torch.float32, torch.float64]


def test_flat_state_is_for_its_own_masters_and_places_only() -> None:
    masters = in_a_row(64, 64)
    state = FlatState(masters)
    place = state.place(0, "average", masters[0])
    states = [{"average": place}, {}]
    assert state.is_for([master.view(8, 8) for master in masters], states)
    assert state.is_for(masters, [{"average": place, "step": 1}, {"average": place}])
    assert not state.is_for(masters[::-1], states)
    assert not state.is_for(in_a_row(64, 64), states)
    assert not state.is_for(masters, [{}, {}])
    assert not state.is_for(masters, [{"average": place.clone()}, {}])


def test_kinds_of_state_do_not_fall_on_the_same_sets_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # as large memory mostly does, each begins on a page of its own, and a cache chooses its sets by where in a page it
    # is; malloc may also put it into what was freed before
    empty = torch.empty

    def on_pages(*size: Any, **kwargs: Any) -> Tensor:
        if kwargs != {"dtype": torch.uint8} or size == (0,):
            return empty(*size, **kwargs)
        return torch.frombuffer(mmap(-1, *size), **kwargs)

    master = on_pages(4 << 20, dtype=torch.uint8).view(torch.float32)
    monkeypatch.setattr(torch, "empty", on_pages)
    state = FlatState([master])
    offsets = {state.place(0, key, master).data_ptr() % 4096 for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert len({offset // 64 for offset in offsets | {master.data_ptr() % 4096}}) == 4
