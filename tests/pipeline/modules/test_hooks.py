"""Gates: a module that is one looks, copies and pickles like a plain one; backward announces itself."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sp_lightning.pipeline.modules.hooks import (
    before_backward,
    hold_while_needed,
    install_gate,
    remove_gate,
)
from sp_lightning.pipeline.weights.units import Member


class Keeper:
    """A pipeline that writes down whose calls it saw."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(member.name)
        return forward(*args, **kwargs)


class Gated:
    """A module that is a gate until the test ends."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.members: list[Member] = []

    def __call__(self, module: nn.Module, name: str = "unit") -> nn.Module:
        self.members.append(Member(name, module, None))
        install_gate(self.members[-1], self.keeper)
        return module

    def remove(self) -> None:
        for member in self.members:
            remove_gate(member)


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.remove()


def test_a_gate_looks_like_the_plain_class(gated: Gated) -> None:
    plain = nn.Linear(2, 3)
    gate = gated(nn.Linear(2, 3))
    assert isinstance(gate, nn.Linear)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(gate), attribute) == getattr(type(plain), attribute)
    assert repr(gate) == repr(plain)
    assert gate.__class__ is type(gate) is not nn.Linear
    assert type(gated(nn.Linear(3, 3))) is type(gate), "one class for each plain class"
    gated.remove()
    assert type(gate) is nn.Linear
    gated.remove()
    assert type(gate) is nn.Linear


def test_a_gate_is_of_the_plain_class_to_those_who_compare_or_look_up(gated: Gated) -> None:
    """As `type(m) == nn.Linear` in a user's weight initialization does, and tables of handlers by class."""

    class Derived(nn.Linear):
        pass

    class WithMetaclass(nn.Linear, metaclass=ABCMeta):
        pass

    for plain in (nn.Linear, Derived, WithMetaclass):
        gate = gated(plain(2, 2))
        assert type(gate) == plain  # noqa: E721 - as users do
        assert plain == type(gate)  # noqa: E721
        assert not type(gate) != plain  # noqa: E721, SIM202
        assert type(gate) in (nn.Conv2d, plain)
        assert type(gate) in {plain}
        assert {plain: "handler"}[type(gate)] == "handler"
        assert {type(gate): "handler"}[plain] == "handler"
        others = {nn.Linear, Derived, WithMetaclass, nn.Conv2d, type(gated(nn.Conv2d(1, 1, 1)))} - {plain}
        assert len(others) == 3
        assert type(gate) not in others
        derived_from_gate = type("More", (type(gate),), {})
        assert derived_from_gate not in {plain, type(gate), "More"}
        assert isinstance(gate, plain)
        gated.remove()
        assert type(gate) is plain


def test_calls_go_through_the_keeper(gated: Gated) -> None:
    """Positional and keyword arguments, and hooks of the user's around them."""
    model = gated(nn.Sequential(nn.Linear(2, 2)), "outer")
    gated(model[0], "inner")
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    model(torch.ones(1, 2))
    model(input=torch.ones(1, 2))
    assert gated.keeper.calls == ["outer", "inner"] * 2
    assert seen == ["hook"] * 2
    gated.remove()
    model(torch.ones(1, 2))
    assert len(gated.keeper.calls) == 4


def test_no_hook_is_registered(gated: Gated) -> None:
    """Hooks would switch off torch's fast paths."""
    gate = gated(nn.TransformerEncoderLayer(4, 2))
    assert not gate._forward_hooks
    assert not gate._forward_pre_hooks
    assert not gate._backward_hooks


def test_a_module_has_one_gate(gated: Gated) -> None:
    gate = gated(nn.Linear(2, 2), "first")
    with pytest.raises(ValueError, match=r"'second' \(Linear\) already belongs"):
        install_gate(Member("second", gate, None), Keeper())
    gate(torch.ones(1, 2))
    assert gated.keeper.calls == ["first"]


def test_a_class_with_its_own_call(gated: Gated) -> None:
    """It is surrounded, and still runs."""

    class Doubling(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    module = Doubling(2, 2)
    expected = module(torch.ones(1, 2))
    assert torch.equal(gated(module)(torch.ones(1, 2)), expected)
    assert gated.keeper.calls == ["unit"]


def test_super_and_isinstance_inside_of_a_class(gated: Gated) -> None:
    class Base(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Derived(Base):
        def forward(self, x: Tensor) -> Tensor:
            assert sum(cls is Derived for cls in type(self).__mro__) == 1
            return 2 * super().forward(x)

    assert gated(Derived())(torch.ones(1)).tolist() == [4]


# ------------------------------------------------------------------------------------------------------ copies, pickles


class WithDeepcopy(nn.Linear):
    """As torch.fx's and some quantized modules have it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WithDeepcopy:
        made = WithDeepcopy(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        made.copied_as = type(self)
        return made


class WithReduce(nn.Linear):
    """Says itself how it is made again."""

    def __reduce__(self) -> Any:
        return remake, (self.in_features, self.out_features, dict(self.state_dict()))


def remake(inputs: int, outputs: int, state: dict[str, Tensor]) -> WithReduce:
    made = WithReduce(inputs, outputs)
    made.load_state_dict(state)
    return made


class WithState(nn.Linear):
    """Leaves something out of its pickle, as loggers and locks must be."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "left_out": True}


class WithNewArguments(nn.Linear):
    """Needs an argument to be made at all."""

    def __new__(cls, *args: Any, tag: str) -> WithNewArguments:
        made = super().__new__(cls)
        made.made_with = tag  # type: ignore[assignment]
        return made

    def __init__(self, inputs: int, outputs: int, tag: str = "") -> None:
        super().__init__(inputs, outputs)
        self.tag = tag

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        return (), {"tag": self.tag}


class WithNew(nn.Linear):
    """Makes its instances itself."""

    def __new__(cls, *args: Any) -> WithNew:
        return super().__new__(cls)


MAKE: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 2),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    lambda: nn.LSTM(2, 2),
    lambda: WithDeepcopy(2, 2),
    lambda: WithReduce(2, 2),
    lambda: WithState(2, 2),
    lambda: WithNew(2, 2),
    lambda: WithNewArguments(2, 2, tag="here"),
]


def through_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    assert b"sp_lightning" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(protocol: int) -> Callable[[nn.Module], nn.Module]:
    def duplicate(module: nn.Module) -> nn.Module:
        data = pickle.dumps(module, protocol)
        assert b"sp_lightning" not in data
        return pickle.loads(data)

    return duplicate


DUPLICATE = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_torch,
    **{f"pickle {protocol}": through_pickle(protocol) for protocol in (2, 4, 5)},
}


@pytest.mark.parametrize("way", DUPLICATE)
@pytest.mark.parametrize("make", MAKE, ids=lambda make: type(make()).__name__)
def test_copies_and_pickles_are_of_the_plain_class(gated: Gated, make: Callable[[], nn.Module], way: str) -> None:
    """Whatever a class does about its copies; what is written can be read without this package."""
    module = make()
    plain = type(module)
    gate = gated(module)
    for child in module.children():
        gated(child)
    gate_class = type(gate)
    duplicate = DUPLICATE[way](module)
    assert type(duplicate) is plain
    if way != "copy":
        assert all(type(child) is nn.Linear or type(child) is nn.BatchNorm1d for child in duplicate.children())
    assert type(module) is gate_class, "the original is a gate as before"
    assert all(map(torch.equal, duplicate.state_dict().values(), module.state_dict().values()))
    assert getattr(duplicate, "left_out", True) is True
    assert getattr(duplicate, "copied_as", plain) is plain
    assert getattr(duplicate, "tag", "here") == "here"
    duplicate(torch.ones(2, 2))
    if way != "copy":  # which has the same children
        assert gated.keeper.calls == []


def test_a_copy_that_fails_leaves_the_gate(gated: Gated) -> None:
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("not this one")

    gate = gated(Uncopyable(2, 2))
    with pytest.raises(TypeError, match="not this one"):
        copy.deepcopy(gate)
    gate(torch.ones(1, 2))
    assert gated.keeper.calls == ["unit"]


# ---------------------------------------------------------------------------------------- classes that change meanwhile


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("before", [True, False], ids=["before", "while-attached"])
def test_a_parametrization_survives_detach(gated: Gated, before: bool) -> None:
    """torch puts a subclass of its own on the module: ours is taken out from under it, its stays."""
    module = nn.Linear(2, 2, bias=False)
    weight = module.weight.detach().clone()
    if before:
        parametrize.register_parametrization(module, "weight", Doubled())
    gated(module)
    if not before:
        parametrize.register_parametrization(module, "weight", Doubled())
    for _ in range(2):
        assert torch.equal(module.weight, 2 * weight)
        assert torch.equal(module(torch.eye(2)), 2 * weight.t())
        assert parametrize.is_parametrized(module, "weight")
        gated.remove()
    assert not [cls for cls in type(module).__mro__ if "_superpipeline_plain" in vars(cls)]
    parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module.weight, 2 * weight)


@pytest.mark.parametrize("remove_while_attached", [True, False])
def test_parametrizations_are_removed_one_by_one(gated: Gated, remove_while_attached: bool) -> None:
    """torch deletes their properties from the module's class, and at the end goes back to the class below it."""
    module = nn.Linear(2, 2)
    expected = nn.functional.linear(torch.eye(2), 2 * module.weight, 2 * module.bias).detach()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(module, name, Doubled())
    for _ in range(3):
        gated.remove()
        gated(module)
    copied = copy.deepcopy(module)
    assert not hasattr(type(copied), "_superpipeline_plain")
    assert not hasattr(type(copy.deepcopy(copied)), "_superpipeline_plain")
    if not remove_while_attached:
        gated.remove()
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(module, name)
        assert torch.equal(module(torch.eye(2)), expected)
        assert torch.equal(copied(torch.eye(2)), expected)
    assert len(gated.keeper.calls) == 2 * remove_while_attached
    gated.remove()
    assert type(module) is nn.Linear


def test_a_registry_of_subclasses_does_not_see_gates(gated: Gated) -> None:
    """`__init_subclass__` that wants arguments, or refuses a name that it has."""
    registry: dict[str, type] = {}

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, kind: str) -> None:
            assert kind not in registry
            registry[kind] = cls

    class First(Registered, kind="first"):
        pass

    gate = gated(First(2, 2))
    assert registry == {"first": First}
    gate(torch.ones(1, 2))
    assert gated.keeper.calls == ["unit"]


def test_a_graph_module_may_be_recompiled(gated: Gated) -> None:
    """It writes `__call__` into its class, as torchvision's feature extractors do whenever they change their mode."""
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gate = gated(traced)
    for node in gate.graph.nodes:
        if node.op == "output":
            node.args = (node.args[0].args[0],)  # without the ReLU
    gate.recompile()
    x = torch.ones(1, 2)
    assert torch.equal(gate(x), gate.get_submodule("0")(x))
    assert gated.keeper.calls == ["unit"]
    gated.remove()
    assert torch.equal(gate(x), gate.get_submodule("0")(x))
    assert gated.keeper.calls == ["unit"]


# ------------------------------------------------------------------------------------------------------ before backward


def test_backward_announces_itself_before_it_runs() -> None:
    """Before the node that made the output, after those that come later in the graph."""
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: order.append("input"))
    y = x.exp()
    before_backward([y], lambda: order.append("announced"), since=1, now=1)
    z = y.square()
    z.register_hook(lambda _: order.append("later"))
    z.sum().backward()
    assert order == ["later", "announced", "input"]


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y


def write_a_row(y: Tensor) -> Tensor:
    y[0] = 0
    return y


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1), lambda y: y[:1], lambda y: y.transpose(0, 1)[:1]])
@pytest.mark.parametrize("change", [lambda y: y, add_in_place, torch.Tensor.relu_, write_a_row])
def test_a_view_changed_in_place_still_announces(
    view: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """Hooks on tensors are lost then, silently (pytorch#181832); prehooks of the base's node are not."""
    order: list[str] = []
    x = torch.ones(2, 2, requires_grad=True)
    x.register_hook(lambda _: order.append("input"))
    output = view(x * 3)
    before_backward([output], lambda: order.append("announced"), since=1, now=1)
    change(output).square().sum().backward()
    assert order == ["announced", "input"]


class Fused(torch.autograd.Function):
    """As a fused kernel: its result is a view of what it has computed, or of its input."""

    order: ClassVar[list[str]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_input: bool) -> Tensor:
        return (x if of_input else x * 1).view(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Fused.order.append("function")
        return gradient.view(2, 2), None


@pytest.mark.parametrize("of_input", [False, True])
def test_a_view_that_a_custom_function_returns_announces_before_the_function_runs(of_input: bool) -> None:
    Fused.order = order = []
    x = torch.ones(2, 2, requires_grad=True)
    output = Fused.apply(x * 3, of_input)
    before_backward([output], lambda: order.append("announced"), since=1, now=1)
    output.square().sum().backward()
    assert order == ["announced", "function"]


def test_a_view_of_a_view_that_a_custom_function_returns() -> None:
    Fused.order = order = []
    output = Fused.apply(torch.ones(2, 2, requires_grad=True), False)[:2]
    before_backward([output], lambda: order.append("announced"), since=1, now=1)
    output.square().sum().backward()
    assert order == ["announced", "function"]


def test_leaves_and_constants_announce_nothing() -> None:
    leaf = torch.ones(1, requires_grad=True)
    before_backward([torch.ones(1), leaf], lambda: pytest.fail("announced"), since=1, now=1)
    (2 * leaf).backward()
    assert leaf.grad == 2


def test_outputs_of_one_node_announce_once() -> None:
    """`chunk` makes several views of one result."""
    count: list[int] = []
    x = torch.ones(4, requires_grad=True)
    parts = (2 * x).chunk(2)
    before_backward(list(parts), lambda: count.append(1), since=1, now=1)
    (parts[0].sum() + parts[1].sum()).backward()
    assert count == [1]


def test_a_node_belongs_to_the_call_that_made_it() -> None:
    """A call around that one announces itself, too; one that hands its input through does not."""
    order: list[str] = []
    y = torch.ones(2, requires_grad=True).exp()
    before_backward([y], lambda: order.append("inner"), since=2, now=2)
    before_backward([y], lambda: order.append("around"), since=1, now=2)
    before_backward([y], lambda: order.append("hands through"), since=3, now=3)
    y.sum().backward()
    assert order == ["inner", "around"]


class Held:
    """What a graph is to `hold_while_needed`."""

    done = False


def test_a_graph_is_held_for_as_long_as_the_leaf_is_needed() -> None:
    leaf, held, reached = nn.Parameter(torch.ones(2)), Held(), []
    gone = weakref.ref(held)
    result = leaf + 1
    hold_while_needed(leaf, held, reached.append)
    del held
    assert gone() is not None
    result.sum().backward()
    assert reached == [gone()]
    del result
    reached.clear()
    assert gone() is None


def test_a_leaf_in_no_graph_holds_nothing() -> None:
    leaf, held = nn.Parameter(torch.ones(2)), Held()
    gone = weakref.ref(held)
    hold_while_needed(leaf, held, lambda graph: None)
    del held
    assert gone() is None


def test_a_leaf_in_several_graphs_holds_those_that_wait() -> None:
    """Someone who keeps all losses keeps the node, step by step: it must not gather what is done."""
    leaf, first, second, reached = nn.Parameter(torch.ones(2)), Held(), Held(), []
    gone = weakref.ref(first)
    results = [leaf + 1]
    hold_while_needed(leaf, first, reached.append)
    first.done = True
    results.append(leaf + 2)
    hold_while_needed(leaf, second, reached.append)
    del first
    assert gone() is None
    results[1].sum().backward()
    assert reached == [second]
