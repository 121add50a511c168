"""Compact optimizers over weights on the device: the bits of the kernels, and checkpoints of the host."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sp_lightning import optim
from sp_lightning.optim import compact
from sp_lightning.optim.compact import CompactOptimizer, Work
from sp_lightning.optim.on_device import BYTES_MEANWHILE
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Scaling

from ..optim.parts import CASES, compare

pytest.importorskip("numba")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("cls", "options", "scaling", "dtype", "master"), CASES)
def test_no_bit_differs(
    cls: Any, options: Any, scaling: Any, dtype: Any, master: Any, moments: str, device: torch.device
) -> None:
    compare(cls, {"master": master, "moments": moments, **options}, scaling, dtype, device)


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, "auto"), (torch.bfloat16, "split"), (torch.bfloat16, "split24")], ids=str
)
def test_what_a_step_takes_meanwhile(
    dtype: torch.dtype, master: str, moments: str, factor: float, cuda: torch.device
) -> None:
    """No more than is planned for each element, scaled or not."""
    weight = nn.Parameter(torch.randn(1 << 18, device=cuda).to(dtype))
    weight.grad = torch.randn_like(weight)
    optimizer = optim.AdamW([weight], master=master, moments=moments)
    optimizer.step()
    work = Work(weight.detach(), weight.grad, optimizer.state[weight], None, Scaling(np.float32(factor)))
    passes = optim.AdamW.passes_of(optimizer.param_groups[0], [work])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(passes)
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * BYTES_MEANWHILE * weight.numel()


@pytest.mark.parametrize(("master", "moments"), [("auto", "fp32"), ("fp32", "bf16"), ("split24", "int8")])
def test_a_checkpoint_moves(master: str, moments: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the device and back. There no numba is needed, and steps are counted on the host."""
    there = made([torch.randn(31, 17).t().bfloat16(), torch.randn(1000).bfloat16()], "cpu", master, moments)
    step(there, 0)
    here = there
    monkeypatch.setattr(compact, "find_spec", lambda name: None)
    there = made(here.param_groups[0]["params"], device, master, moments)
    there.load_state_dict(deepcopy(here.state_dict()))
    assert_same(here, there)
    if moments != "int8":  # whose bits are not promised
        step(here, 1)
        step(there, 1)
        assert_same(here, there)
    monkeypatch.undo()
    back = made(there.param_groups[0]["params"], "cpu", master, moments)
    back.load_state_dict(deepcopy(there.state_dict()))
    assert_same(back, there)


def made(weights: list[Tensor], device: Any, master: str, moments: str) -> CompactOptimizer:
    copies = [nn.Parameter(weight.detach().to(device, copy=True)) for weight in weights]
    return optim.AdamW(copies, lr=1e-2, master=master, moments=moments)


def step(optimizer: CompactOptimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape).bfloat16().to(parameter.device)
    optimizer.step()


def assert_same(host: CompactOptimizer, other: CompactOptimizer) -> None:
    """Weights, state, and what torch's optimizers would get of them."""
    for (p, weight, plain), (q, other_weight, other_plain) in zip(host.export(), other.export(), strict=True):
        assert torch.equal(p, q.cpu())
        assert torch.equal(weight, other_weight.cpu())
        assert all(torch.equal(plain[name], other_plain[name].cpu()) for name in plain)
        assert all(torch.equal(value, other.state[q][name].cpu()) for name, value in host.state[p].items())
        assert all(value.device == (p if name == "step" else q).device for name, value in other.state[q].items())
