"""The step over one unit: bit by bit what `optimizer.step()` does, in one pass over memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline import stepping
from sp_lightning.pipeline.guard import HostParameter
from sp_lightning.pipeline.host import lay_out, tensor_in
from sp_lightning.pipeline.stepping import BY_WEIGHT, Scaling, UnitStep, host_bytes, why_not_by_unit

O = torch.optim
FUSED = (O.Adam, O.AdamW, O.SGD, O.Adagrad)

# What torch's kernels take whole (multiples of 64), what they do not, and what is no tensor of rows at all.
SHAPES = [(64,), (16, 32), (8, 8), (5,), (128,), (33, 7), (), (0, 3), (1,), (2, 64), (64, 9), (64,)]

RECIPES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (O.Adam, {}),
    (O.Adam, {"amsgrad": True, "weight_decay": 0.1, "lr": 0.01}),
    (O.AdamW, {"maximize": True}),
    (O.AdamW, {"amsgrad": True, "betas": (0.5, 0.9)}),
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (O.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (O.RMSprop, {}),
    (O.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (O.NAdam, {"weight_decay": 0.1}),
    (O.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    (O.RAdam, {"weight_decay": 0.1}),
    (O.Adamax, {"weight_decay": 0.1}),
    (O.ASGD, {"weight_decay": 0.1, "t0": 2}),
    (O.Adadelta, {"weight_decay": 0.1}),
    (O.Rprop, {}),
]
WAYS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]
EVERY_RECIPE = [
    pytest.param(cls, {**options, **way}, id="-".join([cls.__name__, *(f"{k}={v}" for k, v in {**options, **way}.items())]))
    for cls, options in RECIPES
    for way in WAYS
    if "fused" not in way or cls in FUSED
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few hundred elements are cut already."""
    monkeypatch.setattr(stepping, "_PIECE", 128)


def in_one_buffer(likes: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes and strides that lie in one buffer, as masters, gradients and copies of a unit do."""
    offsets, nbytes = lay_out([like.numel() * dtype.itemsize for like in likes])
    memory = torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN between them
    return [tensor_in(memory, offset, like, dtype) for offset, like in zip(offsets, likes, strict=True)]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(mine: Tensor, plain: Tensor, what: str = "") -> None:
    assert (mine.dtype, mine.shape, mine.stride()) == (plain.dtype, plain.shape, plain.stride()), what
    assert bits(mine) == bits(plain), what


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    hyper = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in hyper.items()}


class Pair:
    """The same weights twice: stepped by a plain optimizer, and by `UnitStep`."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], Optimizer],
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        gradient_dtype: torch.dtype | None = None,
        copy_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        likes = [torch.randn(shape).to(memory_format=memory_format) for shape in shapes]
        self.plain = [nn.Parameter(like.to(dtype)) for like in likes]
        self.masters = [nn.Parameter(memory) for memory in in_one_buffer(likes, dtype)]
        for mine, plain in zip(self.masters, self.plain, strict=True):
            mine.data.copy_(plain.data)
        self.arrived = in_one_buffer(likes, gradient_dtype or dtype)
        self.copies: list[Tensor | None] = [None] * len(likes)
        if copy_dtype is not None:
            self.copies = list(in_one_buffer(likes, copy_dtype))
        self.theirs, self.ours = make(self.plain), make(self.masters)
        self.units = self.new_units()

    def new_units(self) -> list[UnitStep]:
        return [UnitStep(self.ours, group["params"]) for group in self.ours.param_groups]

    def make_gradients(self, missing: Sequence[int] = ()) -> None:
        """The same random gradients for both."""
        for index, (plain, arrived) in enumerate(zip(self.plain, self.arrived, strict=True)):
            arrived.copy_(torch.randn(arrived.shape))
            plain.grad = None
            if index not in missing:
                plain.grad = torch.empty_like(plain).copy_(arrived)

    def step(self, missing: Sequence[int] = (), scaling: Scaling | None = None) -> None:
        """One step of both; the plain gradients are taken as they are, scaled already if ours are to be."""
        self.theirs.step()
        where = {id(master): index for index, master in enumerate(self.masters)}
        for group, unit in zip(self.ours.param_groups, self.units, strict=True):
            indices = [where[id(master)] for master in group["params"]]
            gradients = [None if index in missing else self.arrived[index] for index in indices]
            unit.step(snapshot(group), gradients, scaling or Scaling(), [self.copies[index] for index in indices])

    def check(self, missing: Sequence[int] = ()) -> None:
        """Weights, state, gradients and copies have the same bits, the state also the same form."""
        for index, (mine, plain) in enumerate(zip(self.masters, self.plain, strict=True)):
            assert_same(mine.data, plain.data, f"weight {index}")
            state, plain_state = self.ours.state.get(mine), self.theirs.state.get(plain)
            assert (state is None) == (plain_state is None), f"state {index}"
            for key in {**(state or {}), **(plain_state or {})}:
                assert_same(state[key], plain_state[key], f"{key} of weight {index}")
            if index in missing:
                continue
            if self.arrived[index].dtype == mine.dtype:
                assert_same(self.arrived[index], plain.grad, f"gradient {index}")
            if (lowered := self.copies[index]) is not None:
                assert_same(lowered, plain.data.to(lowered.dtype), f"copy {index}")

    def run(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.make_gradients()
            self.step()
            self.check()


def recipe(cls: type[Optimizer], options: dict[str, Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda params: cls(params, **options)


@pytest.mark.parametrize(("cls", "options"), EVERY_RECIPE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bits_are_those_of_the_plain_step(cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    Pair(recipe(cls, options), dtype=dtype).run()
