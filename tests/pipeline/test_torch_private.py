"""Private torch APIs that the engine stands on: what no test of a feature would name when torch changes one of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import vmap
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sp_lightning.pipeline.torch_private import (
    contains_others,
    has_foreign_step_hooks,
    parts_of,
    scope_that_ends_before_backward,
    step_is_replaced,
    storage_key,
    zeroing,
)


@pytest.mark.parametrize(
    "view", [lambda w: w.t(), lambda w: w[0], lambda w: w.data, lambda w: w.detach(), lambda w: w.view(-1)]
)
def test_views_share_the_key_of_their_memory(view: Any) -> None:
    """As Parameter, view, `.data`: what autograd saves is any of these. `p.data = other` is another memory."""
    weight = nn.Parameter(torch.ones(2, 3))
    key = storage_key(weight)
    assert storage_key(view(weight)) == key != storage_key(weight.clone())
    weight.data = torch.ones(2, 3)
    assert storage_key(weight) != key
    vmap(lambda x: (pytest.fail("functorch's wrappers have no memory") if storage_key(x) else None, x)[1])(
        torch.ones(2, 2)
    )


def test_tensors_that_contain_others() -> None:
    """Torch has jagged ones, which it flattens by the same protocol."""
    values = torch.randn(5, 2)
    jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    assert contains_others(jagged)
    assert not contains_others(nn.Parameter(values))
    assert parts_of(values)[0] is values
    assert storage_key(parts_of(jagged)[0]) == storage_key(values) == storage_key(jagged)


def test_zero_grad_is_told_from_other_looks() -> None:
    """By its frame, with what it was asked for."""
    found: list[bool | None] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__self__", None) is Tensor.grad:
                guard()
            return super().__torch_function__(func, types, args, kwargs or {})

    def guard() -> None:
        found.append(zeroing())

    weight = torch.ones(1).as_subclass(Watched).requires_grad_()
    module = nn.Module()
    module.parameters = lambda *_: iter([weight])  # type: ignore[method-assign, assignment]
    assert weight.grad is None
    for zero in (module.zero_grad, torch.optim.SGD([weight]).zero_grad):
        zero()
        zero(set_to_none=False)
    assert found == [None, True, False, True, False]


def test_scopes_that_end_before_backward() -> None:
    layer = parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert scope_that_ends_before_backward() is None
    with parametrize.cached():
        assert scope_that_ends_before_backward() == "`parametrize.cached()`"
        layer(torch.ones(1, 2))
    with forward_ad.dual_level():
        assert scope_that_ends_before_backward() == "forward-mode differentiation"
    assert scope_that_ends_before_backward() is None


def test_has_foreign_step_hooks() -> None:
    """Hooks of torch's optimizers are in these four places, in the order in which torch runs them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert not has_foreign_step_hooks(optimizer)
    register_for_all = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert has_foreign_step_hooks(optimizer)
        handle.remove()
    for register in register_for_all:
        with register(lambda *_: None):
            assert not has_foreign_step_hooks(optimizer)  # it may be the engine's
            with register(lambda *_: None):
                assert has_foreign_step_hooks(optimizer)


def test_a_step_that_is_not_torchs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not step_is_replaced(optimizer)
    LambdaLR(optimizer, lambda step: 1.0)
    LambdaLR(optimizer, lambda step: 1.0)
    assert not step_is_replaced(optimizer)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for step in (lambda self, closure=None: None, Mock()):  # Lightning's own tests put mocks there, which have no code
        other.step = step  # type: ignore[method-assign]
        assert step_is_replaced(other)
        monkeypatch.setattr(torch.optim.SGD, "step", step)
        assert step_is_replaced(optimizer)


def test_attributes_that_torch_relies_on_across_its_packages() -> None:
    recurrent, base = nn.LSTM(2, 2), torch.ones(2)
    assert [*map(id, recurrent._flat_weights)] == [*map(id, recurrent.parameters())]
    assert recurrent._call_impl(base[None])[0].shape == (1, 2)
    assert recurrent._compiled_call_impl is None
    for hooks, register in (
        (recurrent._forward_pre_hooks, recurrent.register_forward_pre_hook),
        (recurrent._forward_hooks, recurrent.register_forward_hook),
    ):
        register(hook := lambda *_: None)
        assert [*hooks.values()] == [hook]
    assert base[0]._base is base
