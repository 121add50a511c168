"""Passes by torch's operations against those of the kernels: no bit differs, except what is in codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sp_lightning import optim
from sp_lightning.optim.by_torch import run_by_torch
from sp_lightning.optim.host import HostOptimizer, Work
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Memory, Scaling

SIZE = (1 << 16) + 13
UPDATES: list[tuple[type[HostOptimizer], dict[str, Any]]] = [
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.AdamW, {"betas": (0.4, 0.99), "maximize": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Lion, {"weight_decay": 0.1}),
]
FORMATS = [
    (torch.float32, "auto"), (torch.bfloat16, "fp32"), (torch.bfloat16, "split"), (torch.bfloat16, "split24"),
    (torch.bfloat16, None),
]  # fmt: skip
SCALINGS = [
    (0.3,),
    (0.3, 0.7, 1e-3),
]


def numbers(count: int) -> Tensor:
    """Random ones of many sizes, and what is at both ends of them, halfway between two of bf16, or no number."""
    values = torch.randn(count) * 10.0 ** torch.randint(-6, 2, (count,))
    edges = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]
    values[torch.randperm(count)[:1000]] = torch.tensor(edges).repeat(100)
    ties = values.view(torch.int32)[torch.randperm(count)[:1000]]
    values.view(torch.int32)[torch.randperm(count)[:1000]] = (ties & ~0xFFFF) | 0x8000
    return values


def begun(cls: type[HostOptimizer], dtype: torch.dtype, options: dict[str, Any]) -> tuple[HostOptimizer, Tensor]:
    """An optimizer over a weight, with state as of some steps."""
    torch.manual_seed(0)
    weight = numbers(SIZE).to(dtype)
    optimizer = cls([weight], **options)
    group = optimizer.param_groups[0]
    state = optimizer.state[weight]
    cls.passes_of(group, [Work(weight, weight, state)])
    for name, value in state.items():
        if name == "low":
            value.copy_(torch.randint(0, 1 << 8 * value.itemsize, (SIZE,)))
        elif name in ("exp_avg", "momentum_buffer", "master"):
            value.copy_(numbers(SIZE))
        elif name.startswith("exp_avg_sq") and value.is_floating_point() and value.numel() == SIZE:
            value.copy_(numbers(SIZE).square())
    return optimizer, weight


def copied(memory: Memory, device: Any = "cpu") -> Memory:
    return Memory(*[None if tensor is None else tensor.to(device, copy=True) for tensor in memory])


def assert_same(ours: Memory, kernels: Memory) -> None:
    """The same bits; NaN has several."""
    for name, left, right in zip(Memory._fields, ours, kernels, strict=True):
        if left is None:
            continue
        left = left.cpu()
        if left.is_floating_point():
            assert torch.equal(left.isnan(), right.isnan()), name
            left, right = (value.nan_to_num(0, torch.inf, -torch.inf) for value in (left, right))
            left, right = (value.view(torch.int32 if value.itemsize == 4 else torch.int16) for value in (left, right))
        wrong = (left.int() != right.int()).nonzero()[:, 0]
        assert not len(wrong), (name, len(wrong), wrong[:5], left[wrong[:5]], right[wrong[:5]])


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize(("dtype", "master"), FORMATS)
@pytest.mark.parametrize(("cls", "options"), UPDATES)
def test_no_bit_differs(cls, options, dtype, master, moments) -> None:
    optimizer, weight = begun(cls, dtype, {"lr": 1e-2, "master": master, "moments": moments, **options})
    group = optimizer.param_groups[0]
    copy = torch.zeros(SIZE, dtype=torch.bfloat16) if dtype == torch.float32 else None
    ours: Memory | None = None
    for number in range(4):
        gradient = numbers(SIZE).to(torch.bfloat16 if number % 2 else dtype)
        factors = [np.float32(0.3), np.float32(0.7)][: number % 3]
        scaling = Scaling(*factors, limit=np.float32(0.5)) if number == 2 else Scaling(*factors)
        (step,) = cls.passes_of(group, [Work(weight, gradient, optimizer.state[weight], copy, scaling)])
        ours = copied(step.memory) if ours is None else ours._replace(gradient=gradient)
        run([step])
        run_by_torch(step._replace(memory=ours))
        assert_same(ours, step.memory)
