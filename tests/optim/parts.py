"""Passes that are run by torch's operations on any device and by the kernels, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sp_lightning import optim
from sp_lightning.optim.on_device import compile_for, load_weight, step_on_device
from sp_lightning.optim.passes import Work, count, passes_of, run
from sp_lightning.optim.rules import Memory, Pass, Scaling

from ..helpers import never_waiting

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")

SIZE = (1 << 16) + 13
NOTHING, FACTOR = Scaling(), Scaling(np.float32(0.3))
ALL = Scaling(np.float32(0.3), np.float32(0.7))
UPDATES: list[tuple[type[optim.AdamW], dict[str, Any], Scaling]] = [
    (optim.AdamW, {"weight_decay": 0.1}, NOTHING),
    (optim.AdamW, {"weight_decay": 0.0, "betas": (0.4, 0.99)}, ALL),
    (optim.Adam, {"weight_decay": 0.1}, FACTOR),
    (optim.Lion, {"weight_decay": 0.1}, ALL),
]
STILL = slice(1000)
"""Elements of a weight that move by its decay alone, and stay halfway between two numbers of bf16 without it."""
CASES = [(*update, dtype) for update in UPDATES for dtype in (torch.float32, torch.bfloat16)]


def numbers(count: int, only_finite: bool = False) -> Tensor:
    """Random ones of many sizes, and what is at both ends of them, halfway between two of bf16, or no number."""
    values = torch.randn(count) * 10.0 ** torch.randint(-6, 2, (count,))
    if only_finite:
        return values
    edges = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]
    values[torch.randperm(count)[:1000]] = torch.tensor(edges).repeat(100)
    ties = values.view(torch.int32)[torch.randperm(count)[:1000]]
    values.view(torch.int32)[torch.randperm(count)[:1000]] = (ties & ~0xFFFF) | 0x8000
    return values


def begun(
    cls: type[optim.AdamW], dtype: torch.dtype, options: dict[str, Any], only_finite: bool
) -> tuple[optim.AdamW, Tensor]:
    """An optimizer over a weight, with state as of some steps."""
    torch.manual_seed(0)
    weight = numbers(SIZE, only_finite).to(dtype)
    optimizer = cls([weight], **options)
    state = optimizer.state[weight]
    begin_step(optimizer, [Work(weight, weight, state)])
    for name, value in state.items():
        if name == "low":
            value.copy_(torch.randint(0, 1 << 16, (SIZE,)))
            value[STILL] = -(1 << 15)
        elif name == "exp_avg":
            value.copy_(numbers(SIZE, only_finite))
            value[STILL] = 0
        elif name in ("exp_avg_sq", "exp_avg_sq_with_ties"):
            value.copy_(numbers(SIZE, only_finite).square())
            value[STILL] = torch.tensor([0.0, -0.0]).repeat(STILL.stop // 2)  # was up, or not
    return optimizer, weight


def begin_step(optimizer: optim.AdamW, works: Sequence[Work]) -> list[Pass]:
    """Passes of the step that comes next, which is counted."""
    in_group = [work._replace(group=optimizer.param_groups[0]) for work in works]
    passes = passes_of(optimizer.update, in_group)
    count(in_group)
    return passes


def moved(memory: Memory, device: torch.device) -> Memory:
    return Memory(*[None if tensor is None else tensor.to(device, copy=True) for tensor in memory])


def assert_same_bits(ours: Memory, kernels: Memory) -> None:
    """NaN has several."""
    for name, left, right in zip(Memory._fields, ours, kernels, strict=True):
        assert left is None or torch.equal(bits(left.cpu()), bits(right)), name


def bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def assert_near(ours: Memory, kernels: Memory, few: float = 0.0) -> None:
    """How kernels and a GPU divide is left to their compilers, so a code that lay halfway may be another one.

    Of a `few` numbers, the first digits may have cancelled out.
    """
    left, right = (load_weight(memory.weight, memory.low, None) for memory in (ours, kernels))
    assert_close(left.cpu(), right, 1e-6, few)
    for left, right in zip(ours[3:], kernels[3:], strict=True):
        if left is None:
            continue
        if left.is_floating_point():
            assert_close(left.cpu(), right, 1e-6 if left.itemsize == 4 else 1e-2, few)
        else:
            apart = (left.cpu().int() - right.int()).abs()
            assert apart.max() <= 1
            if left.dtype == torch.int8:  # second moments are rounded at random
                assert apart.float().mean() < 1e-3


def assert_close(left: Tensor, right: Tensor, rtol: float, few: float) -> None:
    is_close = torch.isclose(left, right, rtol=rtol, atol=1e-6)
    assert is_close.logical_not().float().mean() <= few


def compare(
    cls: type[optim.AdamW],
    options: dict[str, Any],
    scaling: Scaling,
    dtype: torch.dtype,
    device: torch.device,
    is_one: bool = False,
) -> None:
    """Take some steps both ways, with gradients in both dtypes; on the CPU torch's own step has the kernels' bits."""
    is_near = options["moments"] == "int8" or device.type != "cpu" or is_one
    optimizer, weight = begun(cls, dtype, {"lr": 1e-2, **options}, is_near)
    copy = torch.zeros(SIZE, dtype=torch.bfloat16) if dtype == torch.float32 else None
    ours: Memory | None = None
    for number in range(3):
        gradient = numbers(SIZE, is_near).to(torch.bfloat16 if number % 2 else dtype)
        gradient[STILL] = 0
        work = Work(weight, gradient, optimizer.state[weight], copy, scaling)
        (step,) = begin_step(optimizer, [work])
        if ours is None or is_near:
            ours = moved(step.memory, device)
        ours = ours._replace(gradient=gradient.to(device))
        run([step])
        there = step._replace(memory=ours)
        if is_one:
            compile_for([there])
        with never_waiting(device):
            step_on_device(there)
        if is_near:
            assert_near(ours, step.memory, few=1e-4 * is_one)
        else:
            assert_same_bits(ours, step.memory)
