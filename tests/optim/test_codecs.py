"""How masters and moments lie in fewer bytes: what comes back, over all bits that a number can have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_lightning.optim.formats import _noise, pack, read_master, read_moment, write_moment
from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import MOMENTUM, Memory, Pass, Rule

pytest.importorskip("numba")
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


def step(lr: float, weight: Tensor, low: Tensor, gradient: Tensor, second: Tensor | None) -> None:
    """A step of plain SGD by the kernel."""
    memory = Memory(weight, low, gradient, None, second, None)
    run([Pass(Rule.of(MOMENTUM, lr=lr), memory, seed=1 if low.dtype == torch.uint8 else None)])


@pytest.mark.parametrize("has_sign", [True, False])
def test_split_keeps_every_bit(has_sign):
    """A step from -0 with lr=-1 makes masters of its gradients, and one with lr=0 reads and writes them."""
    for value in every_kind():
        weight = torch.full(value.shape, -0.0, dtype=torch.bfloat16)
        low = torch.zeros(value.shape, dtype=torch.uint16)
        second = torch.zeros_like(value) if has_sign else None
        state = {"low": low, **({} if second is None else {"exp_avg_sq_with_ties": second})}
        expected = value.masked_fill(value.isnan(), float("nan")).view(torch.int32)
        for lr, gradient in ((-1.0, value), (0.0, torch.zeros_like(value))):
            step(lr, weight, low, gradient, second)
            assert torch.equal(read_master(weight, state).view(torch.int32), expected)
        rounded = value.bfloat16().masked_fill(value.isnan(), float("nan")).view(torch.int16)
        if not has_sign:  # halfway: away from zero
            rounded = torch.where((expected & 0xFFFF) == 0x8000, ((expected >> 16) + 1).short(), rounded)
        assert torch.equal(weight.view(torch.int16), rounded)


def test_split24_keeps_24_bits_and_rounds_the_rest_at_random():
    for value in every_kind()[-8:]:
        weight, low = torch.full(value.shape, -0.0, dtype=torch.bfloat16), torch.zeros(value.shape, dtype=torch.uint8)
        step(-1.0, weight, low, value, None)
        finite = value.isfinite()
        kept = read_master(weight, {"low": low}).view(torch.int32)
        up = (kept - value.view(torch.int32))[finite]
        assert ((up > -256) & (up < 256)).all()
        assert (kept[finite] & 0xFF == 0).all()
        assert (up[value.view(torch.int32)[finite] & 0xFF == 0] == 0).all()
        assert abs(up.double().mean()) < 256 * 4 / up.numel() ** 0.5
        assert torch.equal(kept.view(torch.float32)[~finite].isnan(), value[~finite].isnan())


def packed(value: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a moment; its codes, scales, and what it is then."""
    moment = torch.zeros(value.shape, dtype=codes), torch.zeros(-(-value.numel() // GROUP))
    write_moment(*moment, value.sqrt() if codes == torch.uint8 else value)
    return *moment, read_moment(*moment)


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
    """Weights are divided by it."""
    torch.manual_seed(0)
    group = torch.rand(GROUP).clamp(min=0.01).square()
    group[:4] = torch.tensor([0.0, 1e-30, 1e-12, 1.0])
    *_, back = packed(group.repeat(4096), torch.uint8)
    roots = back.sqrt().view(4096, GROUP).double()
    away = roots.mean(0) - group.double().sqrt()
    assert (away[3:].abs() < 4 * 0.5 / 256 / 4096**0.5).all()
    assert torch.equal(roots[:, :3], torch.full((4096, 3), 1 / 256).double())


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
    """Where the noise is its least, -1.0 was left to a cast, which makes 255 of it."""
    first = int(_noise(0, 0, torch.empty(1), 32))
    begin = (-(1 << 31) - first) * pow(0x9E3779B9, -1, 1 << 32) % (1 << 32)
    codes, scales, roots = torch.zeros(GROUP, dtype=torch.uint8), torch.zeros(1), torch.zeros(GROUP)
    roots[-1] = 1.0
    assert _noise(0, begin, roots, 32)[0] == -(1 << 31)
    pack(codes, scales, roots, 0, begin)
    assert codes[0] == 0
