"""The private torch APIs that the engine stands on: each of these tests fails when torch changes one of them."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from sp_lightning.pipeline import torch_private
from sp_lightning.pipeline.torch_private import (
    call_before_compiling,
    code_of_step,
    contains_others,
    explain_graph_break,
    graph_task,
    has_foreign_step_hooks,
    hide_from_dynamo,
    in_backward,
    in_transform,
    is_capturing,
    is_compiled,
    make_parameters_of,
    parts_of,
    post_accumulate_hooks,
    profiler_is_on,
    running_node,
    scope_that_ends_before_backward,
    sees_torch_functions,
    stand_in_for,
    step_is_replaced,
    storage_key,
    tensor_hooks,
    top_saved_tensor_hooks,
    use_expandable_segments,
    when_backward_ends,
    without_compile,
    without_torch_function,
)

from ..helpers import CAPTURES


def keep(tensor: Tensor) -> Tensor:
    return tensor


def test_the_pair_on_top_is_known() -> None:
    assert top_saved_tensor_hooks() is None
    with saved_tensors_hooks(pytest.fail, pytest.fail), saved_tensors_hooks(keep, keep):
        assert top_saved_tensor_hooks() == (keep, keep)
    assert top_saved_tensor_hooks() is None


def test_transforms_are_seen_and_those_that_differentiate_forbid_hooks() -> None:
    """The latter in words that the engine adds its advice to."""
    seen: list[bool] = []
    for transform in (vmap, grad):
        transform(lambda x: (seen.append(in_transform()), x.sum())[1])(torch.ones(2))
    assert seen == [True, True]
    assert not in_transform()
    with saved_tensors_hooks(keep, keep), pytest.raises(RuntimeError, match=r"^torch\.func\."):
        grad(torch.sum)(torch.ones(2))


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


def test_the_node_that_runs_again_what_a_checkpoint_has_run() -> None:
    """It is the node of a reentrant checkpoint, of which each call has its own, with metadata of its own."""
    seen: list[Any] = []

    def run(x: Tensor) -> Tensor:
        node = running_node()
        seen.append(None if node is None else node.metadata.setdefault("test", []))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: run(run(x)), x, use_reentrant=True)
    x.sum().backward()
    assert seen[:4] == [None] * 4
    assert seen[4] is seen[5] is not seen[6] is seen[7]


def test_the_callback_runs_after_the_last_node() -> None:
    """Once, after all gradients, before `backward` returns."""
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    y = x.exp()
    y.register_hook(lambda _: (when_backward_ends(lambda: order.append("end")), order.append("first node"), None)[2])
    y.sum().backward()
    assert order == ["first node", "accumulated", "end"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_callback_lives_as_long_as_the_pass(fails: bool) -> None:
    """By that the engine tells that a pass is over which ended with an exception."""
    alive: list[weakref.ref[Any]] = []
    seen: list[bool] = []

    def begin(_: Tensor) -> None:
        callback = partial(seen.append, True)
        alive.append(weakref.ref(callback))
        when_backward_ends(callback)

    def go_on(_: Tensor) -> None:
        seen.append(alive[0]() is not None)
        if fails:
            raise ValueError("on purpose")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(go_on)
    y = x.exp()
    y.register_hook(begin)
    with pytest.raises(ValueError, match="on purpose") if fails else nullcontext():
        y.sum().backward()
    assert seen == ([True] if fails else [True, True])
    assert alive[0]() is None


class Loud(nn.Parameter):
    """A parameter that does not want to be touched."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_torch_function_is_switched_off() -> None:
    """Within the scope, and within it only."""
    loud = torch.ones(2).as_subclass(Loud)
    with without_torch_function():
        assert not sees_torch_functions()
        assert (loud + 1).tolist() == [2, 2]
    assert sees_torch_functions()
    with pytest.raises(AssertionError):
        loud + 1


def test_parameters_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of tensors, and of a class that torch does not know."""
    weight = torch.ones(2)
    monkeypatch.setattr(nn.Parameter, "__new__", nn.Parameter.__new__)  # and puts it back afterwards
    make_parameters_of(Loud)
    with without_torch_function():
        made = [nn.Parameter(of) for of in (weight, nn.Parameter(weight), weight.as_subclass(Loud))]
    assert {(type(parameter), parameter.data_ptr()) for parameter in made} == {(nn.Parameter, weight.data_ptr())}
    assert not nn.Parameter(data=weight, requires_grad=False).requires_grad
    assert nn.Parameter().numel() == 0


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


def test_hooks_of_a_parameter_are_found() -> None:
    """In the order of their registration; none where none were registered, and none after removal."""
    parameter = nn.Parameter(torch.ones(2))
    assert tensor_hooks(parameter) == post_accumulate_hooks(parameter) == []
    handles = [parameter.register_hook(keep), parameter.register_hook(abs)]
    late = parameter.register_post_accumulate_grad_hook(print)
    assert tensor_hooks(parameter) == [keep, abs]
    assert post_accumulate_hooks(parameter) == [print]
    for handle in [*handles, late]:
        handle.remove()
    assert tensor_hooks(parameter) == post_accumulate_hooks(parameter) == []


def test_tensors_that_contain_others() -> None:
    """Torch has jagged ones, which it flattens by the same protocol."""
    values = torch.randn(5, 2)
    jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    assert contains_others(jagged)
    assert not contains_others(nn.Parameter(values))
    assert parts_of(values)[0] is values
    assert storage_key(parts_of(jagged)[0]) == storage_key(values) == storage_key(jagged)


def test_the_profiler_is_noticed() -> None:
    with torch.profiler.profile():
        assert profiler_is_on()
    assert not profiler_is_on()


def test_every_function_has_a_test() -> None:
    """A new private API comes with a guard in this file."""
    own = {
        name
        for name, value in vars(torch_private).items()
        if getattr(value, "__module__", "") == torch_private.__name__
    }
    functions = {name for name in own if not name.startswith("_")}
    assert functions <= set(globals()), functions - set(globals())


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_graph_capture_is_noticed(capture: Callable[[nn.Module, Tensor], Any]) -> None:
    seen = []

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(is_capturing())
            return x + 1

    capture(Module(), torch.ones(1))
    assert seen
    assert all(seen)
    assert not is_capturing()


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
        handle = register(lambda *_: None)
        assert has_foreign_step_hooks(optimizer, own=0)
        assert not has_foreign_step_hooks(optimizer, own=1)
        handle.remove()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_the_code_of_an_optimizer_steps_given_tensors(
    cls: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hyperparameters that it is given; the optimizer, its hooks and its parameters do not notice."""
    own, other = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    own.grad, other.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer = cls([own], lr=0.5)
    group = {**optimizer.param_groups[0], "lr": 0.25}
    handles = [
        optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the user's ran")),
        register_optimizer_step_pre_hook(lambda *_: pytest.fail("a hook for all optimizers ran")),
    ]
    state: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch asked for devices, which is slow"))
    with torch.no_grad():
        code_of_step(optimizer, group)({other: state})
    monkeypatch.undo()
    for handle in handles:
        handle.remove()
    assert torch.equal(own, torch.ones(2, 2))
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    reference = nn.Parameter(torch.ones(2, 2))
    reference.grad = torch.ones(2, 2)
    plain = cls([reference], lr=0.25)
    plain.step()
    assert torch.equal(other, reference)
    assert state.keys() == plain.state.get(reference, {}).keys()


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_a_stand_in_steps_in_place_of_an_optimizer(closure: Any) -> None:
    """Torch runs the step of what a hook returns as the first argument; with the same state, and groups of its own."""
    stepped, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    stepped.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer = torch.optim.AdamW([stepped, other])
    stand_in = stand_in_for(optimizer)
    stand_in.param_groups = [{**optimizer.param_groups[0], "params": [stepped]}]
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((stand_in, *args[1:]), kwargs))
    optimizer.step(closure)
    assert optimizer.state.keys() == {stepped}
    assert optimizer.param_groups[0]["params"] == [stepped, other]
    assert torch.equal(other, torch.ones(2))


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


def test_dynamo_leaves_hidden_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no graph, and what it calls is compiled."""
    (tmp_path / "engine.py").write_text("def call(function, x):\n    return function(x + 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    engine = importlib.import_module("engine")
    for hidden, graphs in [(False, ["add_sin_mul"]), (True, ["sin", "mul"])]:
        if hidden:
            hide_from_dynamo(["engine"])
        torch._dynamo.reset()
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any, seen: list[str] = seen) -> Any:
            seen.append("_".join(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"))
            return graph.forward

        compiled = torch.compile(lambda x: engine.call(lambda y: torch.sin(y), x) * 2, backend=backend)
        assert torch.equal(compiled(torch.zeros(1)), torch.ones(1).sin() * 2)
        assert seen == graphs
    torch._dynamo.reset()


def test_something_is_done_before_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody can notice yet that it does, as somebody can in the middle of it."""
    session = getattr(torch.compiler, "_compile_session_context", None)
    monkeypatch.setattr(torch.compiler, "_compile_session_context", session, raising=False)  # undone at the end
    seen: list[bool] = []
    call_before_compiling(lambda: seen.append(torch.compiler.is_compiling()))

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(torch.compiler.is_compiling())
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin(), backend=backend)(torch.zeros(1))
    torch._dynamo.reset()
    assert seen == ([False] if session is None else [False, True])


def test_a_graph_break_is_explained() -> None:
    def function(x: Tensor) -> Tensor:
        return x + 1

    explain_graph_break(function, "because the moon is full")
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)(torch.ones(1))
    assert "the moon is full" in str(raised.value)
    torch._dynamo.reset()


def test_compiled_modules_are_known() -> None:
    """However the user has had them compiled."""
    plain, in_place, forward = (nn.Linear(2, 2) for _ in range(3))
    in_place.compile()
    forward.forward = torch.compile(forward.forward)
    modules = (plain, torch.compile(plain), in_place, forward)
    assert without_compile(modules[1]) is without_compile(plain) is plain
    assert [is_compiled(module) for module in modules] == [False, True, True, True]


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


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA, and has no allocator for it")
def test_the_allocators_settings_can_be_asked_and_told() -> None:
    """Those of the user stay; what becomes of others, tests of the second device show."""
    before = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    try:
        torch_private._configure_allocator("max_split_size_mb:512")
        use_expandable_segments(Mock())
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
    finally:
        torch_private._configure_allocator(before)
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"
    assert settings["max_split_size"] == 512 << 20
