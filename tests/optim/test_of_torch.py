"""Torch's AdamW and Adam by our kernels: the bits of separate passes, or torch's own code."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning import optim
from sp_lightning.optim.of_torch import OnePass, has_torchs_bits, scaling_of
from sp_lightning.optim.passes import Work
from sp_lightning.optim.rules import Update

from ..helpers import torchs_defaults


def from_the_other(
    cls: type[torch.optim.Optimizer], other: Any, weights: list[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer that has loaded a checkpoint of the other class, whose groups say how weights decay."""
    optimizer = cls(weights)
    optimizer.load_state_dict(other(weights, **options).state_dict())
    return optimizer


KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (partial(from_the_other, torch.optim.AdamW, torch.optim.Adam), {"weight_decay": 0.1}),
    (partial(from_the_other, torch.optim.Adam, torch.optim.AdamW), {"weight_decay": 0.1}),
]


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@pytest.mark.parametrize(("cls", "options"), KINDS)
@pytest.mark.parametrize("shape", [(77, 131), (5,), ()])
@pytest.mark.parametrize(
    ("kept", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_it_is_cast_scale_clip_update_and_copy(cls, options, shape, kept, dtype):
    """In each dtype that weights are kept in and gradients come in."""
    theirs, ours = (nn.Parameter(torch.empty(shape, dtype=kept)) for _ in range(2))
    with torch.no_grad():
        ours.copy_(theirs.normal_())
    reference, optimizer = cls([theirs], fused=True, **options), cls([ours], fused=True, **options)
    copy = torch.zeros(shape, dtype=torch.bfloat16) if kept != dtype else None
    factor = torch.tensor(0.3, dtype=kept)
    for number in range(4):
        gradient = torch.randn(shape).to(dtype)
        theirs.grad = gradient.to(kept, copy=True).mul_(0.7).mul_(factor)
        reference.step()
        state = optimizer.state[ours]
        one_pass = OnePass(optimizer, settings_of(optimizer))
        work = Work(ours.data, gradient, state, copy, scaling_of((0.7, factor)))
        assert one_pass.takes(work) == (number > 0)
        if number == 0:  # it makes state
            ours.grad = theirs.grad
            optimizer.step()
        else:
            one_pass.step([work])
            assert copy is None or torch.equal(copy, ours.bfloat16())
        assert torch.equal(theirs, ours)
        for name, value in reference.state[theirs].items():
            assert value is None or torch.equal(value, optimizer.state[ours][name]), name


def test_it_is_left_to_torch_where_it_is_something_else():
    weight = nn.Parameter(torch.randn(4, 6))

    def takes(
        cls=torch.optim.AdamW, weight=weight, dtype=torch.bfloat16, device="cpu", factors=(), copy=None,
        is_newer=False, **options
    ):  # fmt: skip
        optimizer = cls([weight], **{"fused": True, **options})
        if is_newer:  # than this package: it has an option more
            optimizer.defaults["extra"] = False
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        gradient = torch.zeros_like(weight, dtype=dtype, device=device)
        one_pass = OnePass(optimizer, settings_of(optimizer))
        scaling = scaling_of(factors)
        return one_pass.takes(Work(weight.data, gradient, optimizer.state[weight], copy, scaling))

    assert takes()
    for other in (
        {"fused": False},
        {"amsgrad": True},
        {"maximize": True},
        {"is_newer": True},
        {"cls": torch.optim.SGD, "momentum": 0.9},
        {"cls": torch.optim.Adagrad},
        {"cls": type("Own", (torch.optim.AdamW,), {})},
        {"dtype": torch.float16},
        {"device": "meta"},
        {"factors": (4.0, 2.0, 3.0)},
        {"copy": torch.zeros(4, 6, dtype=torch.float16)},
        {"copy": torch.zeros(6, 4, dtype=torch.bfloat16).t()},
        {"weight": nn.Parameter(torch.randn(4, 6).double())},
        {"weight": nn.Parameter(torch.randn(4, 12)[:, ::2])},
    ):
        assert not takes(**other), other


def test_a_cpu_on_which_torch_rounds_otherwise_is_noticed(monkeypatch):
    has_torchs_bits.cache_clear()
    rule_of = Update.rule

    def otherwise(self, group, step):
        rule = rule_of(self, group, step)
        return rule._replace(lr=rule.lr * (1 + 2**-22))

    monkeypatch.setattr(Update, "rule", otherwise)
    assert not has_torchs_bits(optim.AdamW.update, torch.float32)
    monkeypatch.undo()
    has_torchs_bits.cache_clear()
    with torchs_defaults(torch.bfloat16, "meta"):  # which are the user's
        assert has_torchs_bits(optim.AdamW.update, torch.float32)
