"""One unit's step has the bits of a plain one: for each optimizer, alone and together, with casts, copies and gaps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.optim.compact import Work
from sp_lightning.pipeline.gradients.segment_gradients import Scaling
from sp_lightning.pipeline.optimizer import unit_steps
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, BY_WEIGHT, HAVE_FUSED_KERNELS
from sp_lightning.pipeline.optimizer.unit_steps import update_weights
from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in

SHAPES = [(64, 64), (64,), (7, 3), (128, 96), (128,), (), (5, 64)]
SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "nesterov": True}, "AdamW": {"amsgrad": True}}


def laid_out(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors side by side, each with a storage of its own, as masters, gradients and copies lie."""
    offsets, nbytes = lay_out([tensor.numel() * dtype.itemsize for tensor in tensors])
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return [tensor_in(memory, at, like, dtype).copy_(like) for at, like in zip(offsets, tensors, strict=True)]


class Both:
    """The same weights, stepped plainly and as a unit."""

    def __init__(self, kind: type[Optimizer], shapes: list[Any], with_copies: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        values = [torch.randn(shape) for shape in shapes]
        self.plain = [nn.Parameter(value.clone()) for value in values]
        homes = laid_out(values, torch.float32)
        self.masters = [nn.Parameter(home) for home in homes]
        self.copies: list[Any] = laid_out(values, torch.bfloat16) if with_copies else [None] * len(values)
        self.reference, self.ours = kind(self.plain, **settings), kind(self.masters, **settings)

    def step(self, dtype: torch.dtype = torch.float32, missing: int = -1, scaling: Scaling | None = None) -> None:
        gradients: list[Any] = laid_out([torch.randn_like(weight) for weight in self.plain], dtype)
        if missing >= 0:
            gradients[missing] = None
        for weight, gradient in zip(self.plain, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.clone().float()
            if scaling is not None and weight.grad is not None:
                scaling.apply_(weight.grad)
        self.reference.step()
        state = self.ours.state
        for master, gradient in zip(self.masters, gradients, strict=True):
            if gradient is not None:
                state.setdefault(master, {})
        scaling = scaling or Scaling()
        updates = [
            (Work(master.data, gradient, state.get(master, {}), copied), scaling)
            for master, gradient, copied in zip(self.masters, gradients, self.copies, strict=True)
            if gradient is not None
        ]
        before = [work.gradient.clone() for work, _ in updates]
        with torch.no_grad():
            settings = {key: value for key, value in self.ours.param_groups[0].items() if key != "params"}
            update_weights(self.ours, settings, updates)
        assert all(torch.equal(work.gradient, kept) for (work, _), kept in zip(updates, before, strict=True))

    def check(self) -> None:
        for index, (expected, found) in enumerate(zip(self.plain, self.masters, strict=True)):
            assert torch.equal(expected, found), index
            if self.copies[index] is not None:
                assert torch.equal(expected.bfloat16(), self.copies[index]), index
            for key, value in self.reference.state[expected].items():
                found_value = self.ours.state[found][key]
                assert torch.equal(value, found_value) if isinstance(value, Tensor) else value == found_value, key


@pytest.fixture(autouse=True, params=[1 << 10, 1 << 16])
def _alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights are stepped by themselves."""
    monkeypatch.setattr(unit_steps, "_ALONE", request.param)


@pytest.mark.parametrize("scaling", [None, Scaling((0.5,), clamp=0.7)], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, SETTINGS.get(kind.__name__, {})) for kind in (*BY_ELEMENT, *BY_WEIGHT)),
        *((kind, {"fused": True, **SETTINGS.get(kind.__name__, {})}) for kind in HAVE_FUSED_KERNELS),
    ],
)
def test_the_bits_of_each_optimizer(kind: Any, settings: Any, dtype: torch.dtype, scaling: Scaling | None) -> None:
    shapes = [(64, 64), (32, 16), (16, 64)] if kind in BY_WEIGHT else SHAPES  # Muon takes matrices
    both = Both(kind, shapes, with_copies=dtype != torch.float32, **settings)
    for _ in range(3):
        both.step(dtype, scaling=scaling)
    both.check()


@pytest.mark.parametrize("missing", range(len(SHAPES)))
def test_weights_without_a_gradient_stay_as_they_are(missing: int) -> None:
    """From the first step on, or in between: the number of steps differs within a run then."""
    both = Both(torch.optim.Adam, SHAPES)
    for step in range(5):
        both.step(missing=missing if step in (0, 2) else -1)
    both.check()


def test_state_that_is_loaded_forgotten_or_odd() -> None:
    both = Both(torch.optim.AdamW, SHAPES)
    both.step()
    for optimizer in (both.reference, both.ours):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both.step()
    kept = both.ours.state.pop(both.masters[1]), both.reference.state.pop(both.plain[1])
    before = copy.deepcopy(kept[0])
    both.step()
    both.check()
    assert all(torch.equal(before[key], kept[0][key]) for key in before), "what somebody holds is not written to"
    both.ours.state[both.masters[1]], both.reference.state[both.plain[1]] = kept
    for optimizer in (both.reference, both.ours):
        optimizer.state[optimizer.param_groups[0]["params"][3]]["note"] = "the user's"
    both.step()
    both.check()
    both.ours.state.clear()
    both.reference.state.clear()
    both.step()
    both.check()
