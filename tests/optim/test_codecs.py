"""How masters and moments lie in fewer bytes: what comes back, over all bits that a number can have."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sp_lightning import optim
from sp_lightning.optim.layout import GROUP, make_state
from sp_lightning.optim.on_device import pack, store_weight, unpack
from sp_lightning.optim.rules import Kind, Memory

from .parts import needs_numba

pytestmark = needs_numba
HALF = 1 << 16
EDGES = (0, 1, 0x7F, 0x80, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)  # subnormals, infinity, NaN
TIES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def values(high: Tensor, low: Tensor) -> Tensor:
    """All pairs of halves, as fp32."""
    return ((high.int()[:, None] << 16) | low.int()).flatten().view(torch.float32)


def every_kind() -> list[Tensor]:
    """256 high halves with all low halves, and all high halves with some low ones."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor(EDGES)
    high = torch.cat([edges, edges + 0x8000, torch.randint(0, HALF, (234,), generator=generator)])
    some = torch.cat([torch.tensor(TIES), torch.randint(0, HALF, (26,), generator=generator)])
    return [*(values(part, torch.arange(HALF)) for part in high.split(32)), values(torch.arange(HALF), some)]


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_split_keeps_every_bit(moments):
    """Torch's operations write masters, a step of the kernels by zero reads and writes them, and they come back."""
    for value in every_kind():
        weight = torch.zeros(value.shape, dtype=torch.bfloat16)
        optimizer = optim.AdamW([weight], lr=0.0, weight_decay=0.0, moments=moments)
        state = optimizer.state[weight] = make_state(weight, optimizer.param_groups[0])
        second = state.get("exp_avg_sq_with_ties")
        was_up = store_weight(Memory(weight, state["low"], None, None, second, None), value.clone(), second is not None)
        if second is not None:
            second.view(torch.int32).add_(was_up, alpha=-(1 << 31))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        expected = value.masked_fill(value.isnan(), float("nan")).view(torch.int32)
        assert torch.equal(optimizer.master(weight).view(torch.int32), expected)
        rounded = value.bfloat16().masked_fill(value.isnan(), float("nan")).view(torch.int16)
        if second is None:  # halfway: away from zero
            rounded = torch.where((expected & 0xFFFF) == 0x8000, ((expected >> 16) + 1).short(), rounded)
        assert torch.equal(weight.view(torch.int16), rounded)


SEED = torch.tensor(7, dtype=torch.int32)


def packed(value: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a moment; its codes, scales, and what it is then."""
    moment, scales = torch.zeros(value.shape, dtype=codes), torch.zeros(-(-value.numel() // GROUP))
    back = torch.zeros(value.shape)
    whole = value.numel() - value.numel() % GROUP
    for begin, end in ((0, whole), (whole, value.numel())):
        if begin == end:
            continue
        part, groups = slice(begin, end), slice(begin // GROUP, -(-end // GROUP))
        pack(moment[part], scales[groups], value[part].clone(), SEED)
        back[part] = unpack(moment[part], scales[groups])
    return moment, scales, back


@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, 100 * GROUP + 37])
def test_int8_is_the_nearest_code(count):
    torch.manual_seed(0)
    value = torch.randn(count) * 10 ** torch.empty(count).uniform_(-6, 0)
    codes, scales, back = packed(value, torch.int8)
    scale = scales.repeat_interleave(GROUP)[:count]
    steps = 254 * value / (scale + value.abs())
    assert (codes - steps).abs().max() <= 0.5001
    torch.testing.assert_close(back, codes * scale / (254 - codes.float().abs()))
    assert torch.equal(packed(back, torch.int8)[0], codes)


def test_uint8_is_unbiased_and_never_less_than_one_step():
    """Weights are divided by it. With random seeds, the noise of each value is uniform.

    A value's error is then in an interval of one step, and its mean is zero. By Hoeffding's inequality, the mean of so
    many exceeds the bound for any value of the group with a probability of at most 1e-9.
    """
    torch.manual_seed(0)
    count = 1 << 10
    group = torch.rand(GROUP).clamp(min=0.01).square()
    group[:4] = torch.tensor([0.0, 1e-30, 1e-12, 1.0])
    seeds = torch.randint(-(1 << 31), 1 << 31, (count,)).int()
    codes, scales = torch.zeros(count, GROUP, dtype=torch.uint8), torch.zeros(count, 1)
    for seed, *places in zip(seeds, codes, scales, strict=True):
        pack(*places, group.clone(), seed)
    roots = unpack(codes.flatten(), scales.flatten()).view(count, GROUP).sqrt().double()
    away = (roots - group.double().sqrt()).mean(0)
    bound = math.sqrt(math.log(2 * GROUP / 1e-9) / (2 * count)) / 256
    assert (away[3:].abs() < bound).all()
    assert torch.equal(roots[:, :3], torch.full((count, 3), 1 / 256).double())


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(codes, bad):
    value = torch.ones(3 * GROUP)
    value[GROUP + 5] = bad
    *_, back = packed(value, codes)
    assert not back[GROUP + 5].isfinite()
    assert torch.equal(back[:GROUP].round(), value[:GROUP])
    assert torch.equal(packed(torch.zeros(GROUP), codes)[2], torch.zeros(GROUP))


def test_nothing_is_never_the_largest_code():
    """Where it is rounded down most, a cast would make 255 of -1."""
    codes, scales, values = torch.zeros(GROUP, dtype=torch.uint8), torch.zeros(1), torch.zeros(GROUP)
    values[-1] = 1.0
    pack(codes, scales, values, torch.tensor(-(1 << 31), dtype=torch.int32))
    assert codes[0] == 0


def test_kernels_that_are_compiled_at_the_same_time_do_not_mix(tmp_path):
    """Two processes look into an empty cache and number their files alike; one of them writes its code last."""
    from numba.core.caching import IndexDataCacheFile

    from sp_lightning.optim.kernels import compile_loop

    kinds = [Kind(False, False, False, 4, 0, 4, 4, 4, 0), Kind(False, False, False, 2, 2, 2, 4, 4, 0)]
    names = [compile_loop(kind)._cache._impl.filename_base for kind in kinds]
    first, second = (IndexDataCacheFile(str(tmp_path), name, "stamp") for name in names)
    with patch.object(IndexDataCacheFile, "_load_index", dict):
        first.save("first", "code of the first")
        second.save("second", "code of the second")
    first._save_data(first._data_name(1), "code of the first")
    assert [first.load("first"), second.load("second")] == ["code of the first", "code of the second"]
