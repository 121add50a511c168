"""State that a unit changes, given to it or kept on it: plain training's gradients, or an error that names the unit."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import queue
import random
import tempfile
import threading
import tracemalloc
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader
from torch.utils.dlpack import to_dlpack

from sp_lightning.pipeline.activations import contract

from ...helpers import Run, assert_same_story, attached
from ...zoo.blocks import Block, Chain

Change = Callable[[Any], float]

# -------------------------------------------------------------------------------------- kinds, and what changes them


@dataclass
class Plain:
    count: Any = 0.0

    def __call__(self) -> float:
        self.count += 1
        return self.count


@dataclass(slots=True)
class Slotted:
    count: float = 0.0
    inner: list[Any] = field(default_factory=lambda: [Plain()])


def counting(state: Any) -> float:
    state.count += 1
    return state.count


def growing(method: str, *arguments: Any) -> Change:
    """Of what has one more after a call of the method."""

    def change(state: Any) -> float:
        getattr(state, method)(*arguments)
        return len(state)

    return change


def setting(state: Any) -> float:
    state["count"] = state.get("count", 0.0) + 1
    return state["count"]


class Hiding(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {}


class Number(int):
    count = 0.0


class Counting(nn.Module):
    """Counts in a buffer, and is no part of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self) -> float:
        self.count += 1
        return self.count.item()


def past_versions(state: Tensor) -> float:
    state.data.add_(1)
    return state[0].item()


@torch.no_grad()
def adding_to_first(state: list[Tensor]) -> float:
    return adding(state[0])


def swapping(state: Any) -> float:
    state.count = torch.cos if state.count is torch.sin else torch.sin
    return state.count(torch.ones(())).item()


def moving(state: torch.distributions.Normal) -> float:
    state.loc = state.loc + 1
    return state.loc.item()


def adding(state: Any) -> float:
    state += 1
    return float(state[0])


def then(action: Callable[[Any], Any], result: Change) -> Change:
    return lambda state: (action(state), result(state))[1]


def numbers() -> list[float]:
    return [1 + 0.1 * number for number in range(100)]


def local() -> threading.local:
    state = threading.local()
    state.count = 0.0
    return state


SEEN: dict[str, tuple[Callable[[], Any], Change]] = {
    "list": (list, growing("append", 1)),
    "dict": (dict, setting),
    "set": (set, lambda state: growing("add", len(state))(state)),
    "bytearray": (bytearray, growing("append", 1)),
    "array": (lambda: array.array("d"), growing("append", 1.0)),
    "deque": (collections.deque, growing("append", 1)),
    "defaultdict": (lambda: collections.defaultdict(float), setting),
    "OrderedDict": (collections.OrderedDict, setting),
    "Counter": (collections.Counter, setting),
    "ChainMap": (collections.ChainMap, setting),
    "UserList": (collections.UserList, growing("append", 1)),
    "view of a dict": (lambda: types.MappingProxyType({"a": Plain()}), lambda state: state["a"]()),
    "iterator": (lambda: iter(numbers()), next),
    "iterator of a range": (lambda: iter(range(1, 99)), next),
    "generator": (lambda: (number for number in numbers()), next),
    "enumerate": (lambda: enumerate(numbers()), lambda state: next(state)[1]),
    "zip": (lambda: zip(numbers(), numbers(), strict=True), lambda state: next(state)[1]),
    "map": (lambda: map(float, numbers()), next),
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle(numbers()), next),
    "dataclass": (Plain, counting),
    "slots": (Slotted, counting),
    "within slots": (Slotted, lambda state: state.inner[0]()),
    "namespace": (lambda: types.SimpleNamespace(count=0.0), counting),
    "local of a thread": (local, counting),
    "numpy": (lambda: numpy.ones(3), adding),
    "numpy of objects": (lambda: numpy.array([1.0], dtype=object), adding),
    "generator of numpy": (lambda: numpy.random.default_rng(0), lambda state: state.random()),
    "old generator of numpy": (lambda: numpy.random.RandomState(0), lambda state: state.rand()),
    "random": (lambda: random.Random(0), lambda state: state.random()),
    "generator of torch": (torch.Generator, lambda state: torch.rand(1, generator=state).item()),
    "BytesIO": (io.BytesIO, then(lambda state: state.write(b"a"), lambda state: state.tell())),
    "StringIO": (io.StringIO, then(lambda state: state.write("a"), lambda state: state.tell())),
    "file": (tempfile.TemporaryFile, then(lambda state: state.write(b"a"), lambda state: state.tell())),
    "memoryview": (lambda: memoryview(bytearray(1)), then(lambda s: s.__setitem__(0, s[0] + 1), lambda s: s[0])),
    "ctypes": (lambda: (ctypes.c_double * 1)(1.0), then(lambda s: s.__setitem__(0, s[0] + 1), lambda s: s[0])),
    "queue": (queue.Queue, then(lambda state: state.put(1), lambda state: state.qsize())),
    "simple queue": (queue.SimpleQueue, then(lambda state: state.put(1), lambda state: state.qsize())),
    "semaphore": (threading.Semaphore, then(lambda state: state.release(), lambda state: state._value)),
    "context variable": (
        lambda: contextvars.ContextVar("count", default=0),
        then(lambda state: state.set(state.get() + 1), lambda state: state.get()),
    ),
    "three levels": (lambda: {"a": {"b": [1]}}, lambda state: growing("append", 1)(state["a"]["b"])),
    "five levels": (lambda: [({"a": [Slotted()]},)], lambda state: counting(state[0][0]["a"][0])),
    "tensor in an object": (lambda: Plain(torch.ones(1)), lambda state: adding(state.count)),
    "partial": (lambda: functools.partial(next, iter(numbers())), lambda state: state()),
    "method": (lambda: Plain().__call__, lambda state: state()),
    "builtin method": (lambda: numbers().pop, lambda state: state()),
    "callable": (Plain, lambda state: state()),
    "another function": (lambda: Plain(torch.sin), swapping),
    "hidden by __getstate__": (Hiding, counting),
    "number with an attribute": (lambda: Number(1), counting),
    "set of objects": (lambda: frozenset({Plain().__call__}), lambda state: next(iter(state))()),
    "module": (lambda: [Counting()], lambda state: state[0]()),
    "method of a module": (lambda: Counting().forward, lambda state: state()),
    "parameter": (lambda: [nn.Parameter(torch.ones(1))], adding_to_first),
    "tensor past its version": (lambda: torch.ones(2), past_versions),
    "larger tensor past its version": (lambda: torch.ones(10_000), past_versions),
    "tensor with an attribute": (lambda: setattr(state := torch.ones(1), "count", 0.0) or state, counting),
    "storage": (lambda: torch.ones(1).untyped_storage(), then(lambda s: s.__setitem__(0, s[0] + 1), lambda s: s[0])),
    "distribution": (lambda: torch.distributions.Normal(torch.ones(1), 1.0), moving),
    "quasirandom": (lambda: torch.quasirandom.SobolEngine(1), lambda state: state.draw(1).item()),
    "iterator of a loader": (lambda: iter(DataLoader(numbers(), 1)), lambda state: next(state).item()),
    "what nobody has thought of": (lambda: to_dlpack(torch.ones(1)), lambda state: 1.0),
}
# What torch's pytree takes apart: the second forward is given what the first one was given.
REBUILT = {"list", "dict", "deque", "defaultdict", "OrderedDict", "three levels"}


COUNTS = Plain()


def with_closure() -> Callable[[], float]:
    state = Plain()
    return lambda: state()


def with_default() -> Callable[[], float]:
    state = Plain()
    return lambda state=state: state()


def with_attribute() -> Callable[[], float]:
    def function() -> float:
        return counting(function)

    function.count = 0.0
    return function


# What no look at a unit and its arguments shows.
UNSEEN: dict[str, tuple[Callable[[], Any], Change]] = {
    "closure": (with_closure, lambda state: state()),
    "default": (with_default, lambda state: state()),
    "attribute of a function": (with_attribute, lambda state: state()),
    "class": (lambda: type("Fresh", (), {"count": 0.0}), counting),
    "global": (lambda: None, lambda state: COUNTS()),
}


class Stateful(Block):
    """Has a state, or is given one, and computes with what comes of it."""

    def __init__(self, change: Change, state: Any) -> None:
        super().__init__()
        self.change = change
        self.state = state

    def forward(self, x: Tensor, state: Any) -> Tensor:
        number = self.change(self.state if state is None else state)
        return torch.tanh(super().forward(x) * (1 + 0.1 * number))


class SideBySide(nn.Module):
    """A block for each kind, with gradients that depend on no other kind, between two blocks without a state."""

    def __init__(self, kinds: dict[str, tuple[Callable[[], Any], Change]], is_given: bool) -> None:
        super().__init__()
        self.makers = {kind: make if is_given else lambda: None for kind, (make, _) in kinds.items()}
        blocks = {kind: Stateful(change, None if is_given else make()) for kind, (make, change) in kinds.items()}
        self.first, self.stateful, self.last = Block(), nn.ModuleDict(blocks), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(sum(block(x, self.makers[kind]()) for kind, block in self.stateful.items()))


OPTIONS = {"recompute": {"activations": "recompute"}, "auto": {"memory_budget": "1GiB"}}


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize("is_given", [False, True], ids=["kept", "given"])
def test_state_that_is_changed(is_given: bool, policy: str) -> None:
    """Its unit keeps what it saved, and says so once if the user has chosen to recompute; others recompute."""

    def story(run: Run) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                run.normal_step(f"step {step}", None, seed=step)
                run.model.zero_grad()
        if run.pipe is not None:
            said = [str(warning.message).split("'")[1] for warning in caught if "second time" in str(warning.message)]
            kept = SEEN.keys() - (REBUILT if is_given else set())
            assert sorted(said) == sorted(f"stateful.{kind}" for kind in kept if policy == "recompute")
            assert run.pipe.stats.recomputed == 3 + (1 if policy == "recompute" else 3) + 3 * len(SEEN.keys() - kept)

    assert_same_story(story, lambda: SideBySide(SEEN, is_given), debug=False, **OPTIONS[policy])


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize("is_given", [False, True], ids=["kept", "given"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_state_that_nobody_sees(kind: str, is_given: bool, policy: str) -> None:
    model = SideBySide({kind: UNSEEN[kind]}, is_given)
    message = f"'stateful.{kind}' has computed something else .*Use `activations='keep'`"
    with attached(model, **OPTIONS[policy]) as pipe, pipe.step(), pytest.raises(RuntimeError, match=message):
        model(Run.rows(0)).square().mean().backward()


# ------------------------------------------------------------------------------------------ how often it is looked at

ended: list[str] = []  # a global variable


class Noting(Block):
    """Notes that a forward has come to its end, behind all that it saves."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.watched = name, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) / 0 if self.name == "nan" else super().forward(x)
        ended.append(self.name)
        return x


def test_units_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the first two forwards, and at the end of the first two second ones, where NaN is NaN."""
    model, counts, looked_at = Chain(Noting(name) for name in ("a", "b", "nan")), [], []

    def noting(tensor: Tensor) -> int:
        looked_at.extend([tensor] if tensor.shape == (1,) else [])
        return tensor._version

    monkeypatch.setattr(contract, "version_of", noting)
    with attached(model, activations="recompute") as pipe:
        for step in range(4):
            looked_at.clear()
            ended.clear()
            with pipe.step():
                model(Run.rows(step)).sum().backward()
            counts.append((len(looked_at), len(ended)))
        assert pipe.stats.recomputed == 3 + 2 + 2 + 2
    assert counts == [(3 * 2, 3 + 3), (3 * 2, 3 + 2), (0, 3), (0, 3)]


class Pair(NamedTuple):
    first: Any
    second: Any


def with_partial() -> Any:
    return functools.partial(torch.add, torch.ones(1), alpha=2)


HELD: dict[str, Callable[[], Any]] = {
    "containers": lambda: (1, [2.5, {"a": {"b"}, 3: frozenset({4})}], collections.OrderedDict(a=1)),
    "named tuple": lambda: Pair(1, [torch.float32, slice(2), Pair]),
    "object": lambda: Plain([Plain(1), types, logging.getLogger("a"), weakref.ref(Plain), torch.ops.aten.add.Tensor]),
    "callables": lambda: [with_partial(), Plain(0.0).__call__, torch.tanh, len, [].append, with_closure()],
    "numpy": lambda: [numpy.ones(3), numpy.array(["a"]), numpy.float32(1), numpy.bool_(True)],
    "modules": lambda: [nn.Linear(2, 2), Counting(), nn.ModuleDict({"a": nn.Tanh()})],
    "tensors": lambda: [torch.ones(2), torch.ones(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(20_000)],
    "rare tensors": lambda: [
        torch.ones(2, dtype=torch.cfloat).conj(),
        torch.ones(2).to(torch.float8_e5m2),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(1)]),
        TwoTensor(torch.ones(2), torch.ones(2)),
    ],
}


class Holding(Block):
    """Has a value that stays as it is, and makes another one like it in each forward if that is compared by value."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.held, self.sizes = make(), ()

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        self.sizes = (len(x), [*x.shape], {"a": {1}})
        return super().forward(x)


@pytest.mark.filterwarnings("error:.*second time", "ignore:(The PyTorch API of nested|torch.quantize)")
def test_what_stays_as_it_is_keeps_no_unit_from_recomputing() -> None:
    given = [torch.ones(1), nn.Tanh(), Counting().forward, torch.tanh, len, numpy.float32(1), slice(1), Pair]
    model = nn.ModuleList(map(Holding, HELD.values()))
    with attached(model, activations="recompute") as pipe:
        for step in range(3):
            with pipe.step():
                x = Run.rows(step)
                for block in model:
                    x = block(x, *given)
                x.sum().backward()
        assert pipe.stats.recomputed == 2 * (len(HELD) - 1), "the first call makes `sizes`"


def test_a_look_reads_no_data() -> None:
    """What is large, leads to too much or has memory in C is not compared: it counts as changed."""
    memory = numpy.zeros(1 << 24, numpy.uint8)
    for data in (memory, memory[:9].view(numpy.memmap), [0] * 200_000, {"a": [{"b": 1} for _ in range(60_000)]}):
        module = nn.Module()
        module.data = data
        tracemalloc.start()
        look = contract.Snapshot([module], [])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < memory.nbytes / 2
        assert "'data'" in (look.obstacle() or "")
        assert contract.Snapshot([], [module]).obstacle() == "changes what it is given"


class ReturnsData(nn.Module):
    """Returns what cannot be searched for tensors, beside its result; nothing that it saves is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.tanh(x + self.bias))
        y.data_set = [0] * 200_000
        return y


def test_a_unit_that_returns_what_cannot_be_searched_keeps() -> None:
    """Its second output could not be compared with the first."""

    def story(run: Run) -> None:
        run.normal_step("step", None)
        assert run.pipe is None or run.pipe.stats.recomputed == 1

    build = lambda: Chain([Block(), ReturnsData(), Block()])  # noqa: E731
    assert_same_story(story, build, units=[Block, ReturnsData], activations="recompute")


class EveryOther(Block):
    """Counts in every other call, as its parent says."""

    count = 0.0

    def forward(self, x: Tensor, counts: bool) -> Tensor:
        self.count += counts
        return super().forward(x) * (1 + 0.1 * self.count)


class SaysWhen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), EveryOther(), Block()])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, middle, last = self.blocks
        return last(middle(first(x), self.calls % 2 == 1))


def test_a_unit_is_trusted_after_two_looks_in_a_row() -> None:
    """What its first call changes may be made once, what the third changes is a habit."""

    def story(run: Run) -> None:
        for step in range(5):
            run.normal_step(f"step {step}", None, seed=step)
            run.model.zero_grad()
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == 2 + 2 + 1 + 1 + 1, "its second call changes nothing"

    assert_same_story(story, SaysWhen, activations="recompute", debug=False)


class Draws(nn.Module):
    """Saves nothing for backward as long as its weight is frozen, and nothing comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.chance = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.tanh(x * self.scale * self.chance.random())


def test_a_unit_is_looked_at_when_it_saves_something() -> None:
    def story(run: Run) -> None:
        for step in range(4):
            run.model.blocks[0].requires_grad_(step > 1)
            run.normal_step(f"step {step}", None, seed=step)
            run.model.zero_grad()

    assert_same_story(story, lambda: Chain([Draws(), Block()]), units=[Block, Draws], activations="recompute")
