"""Private torch APIs that the engine stands on: what no test of a feature would name when torch changes one of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from sp_lightning.pipeline.torch_private import (
    contains_others,
    graph_task,
    has_foreign_step_hooks,
    in_backward,
    parts_of,
    scope_that_ends_before_backward,
    step_is_replaced,
    storage_key,
    top_saved_tensor_hooks,
    zeroing,
)


def keep(tensor: Tensor) -> Tensor:
    return tensor


def test_the_pair_on_top_is_known() -> None:
    assert top_saved_tensor_hooks() is None
    with saved_tensors_hooks(pytest.fail, pytest.fail), saved_tensors_hooks(keep, keep):
        assert top_saved_tensor_hooks() == (keep, keep)
    assert top_saved_tensor_hooks() is None


def test_backward_passes_are_told_apart() -> None:
    """One number for all nodes of a pass; the reentrant backward of a checkpoint inside of it has another."""
    seen: list[tuple[str, int]] = []
    assert not in_backward()

    def note(name: str, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: seen.append((name, graph_task() if in_backward() else -1)))
        return tensor

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = note("below", x.exp())
        y = checkpoint(lambda y: note("inside", y.sin()).cos(), y, use_reentrant=True)
        note("above", y.exp()).sum().backward()
    names, numbers = zip(*seen, strict=True)
    assert names == ("above", "inside", "below") * 2
    assert numbers[0] == numbers[2] != numbers[1]
    assert len(set(numbers)) == 4, "the second pass has numbers of its own"
    assert -1 not in numbers
    assert graph_task() == -1
    assert not in_backward()


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


def test_an_identity_is_not_used_again_while_it_is_kept() -> None:
    """Without the memory: the next tensor of the same size may well get the same address, but not the same identity."""
    kept, keys = [], []
    for _ in range(50):
        tensor = torch.ones(4)
        kept.append(StorageWeakRef(tensor.untyped_storage()))
        keys.append(storage_key(tensor))
        assert not kept[-1].expired()
        del tensor
        assert kept[-1].expired()
    assert len(set(keys)) == len(keys)


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
