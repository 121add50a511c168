"""What a forward changes: found, undone for a second forward, and as it was found afterwards."""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from sp_lightning.pipeline.activations.effects import SideEffects


class Box:
    """An object of a user's own class."""

    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content)


@dataclass(slots=True)
class Slots:
    """Has no dictionary, and nothing in one of its slots."""

    x: int = 1
    rows: list[int] = field(default_factory=list)
    later: int = field(init=False, repr=False)


class Counted(dict[str, int]):
    """A container with attributes, that can be filled in its own way only."""

    def __init__(self) -> None:
        super().__init__(a=1)
        self.hits = 0

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError


class Registered(type):
    """A class of classes, as those of pydantic are."""


class Holder(nn.Module):
    """Holds one thing of any kind, as an attribute of a child."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.part = nn.Module()
        self.part.thing = thing


def seen(thing: Any) -> Any:
    """A picture of something that can be compared."""
    if isinstance(thing, set):
        return sorted(thing)
    if isinstance(thing, Tensor):
        return thing.tolist()
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, SimpleNamespace | argparse.Namespace):
        return dict(vars(thing))
    if isinstance(thing, bytearray):
        return bytes(thing)
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.Generator | np.random.RandomState):
        return repr(copy.deepcopy(thing).bytes(8))
    if isinstance(thing, Counted):
        return [*thing.items(), thing.hits]
    if isinstance(thing, Slots):
        return {name: seen(getattr(thing, name, None)) for name in ("x", "rows", "later")}
    if isinstance(thing, Box | SobolEngine):
        return {key: seen(value) for key, value in vars(thing).items()}
    if isinstance(thing, dict):
        return [(key, seen(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [seen(value) for value in thing]
    return thing


def change_number(module: Holder) -> None:
    module.part.thing += 1


def change_tensor(module: Holder) -> None:
    module.part.thing.add_(1)


CHANGES: list[tuple[Any, Callable[[Any], object]]] = [
    (1, change_number),
    (1.5, change_number),
    ((1, 2), lambda m: setattr(m.part, "thing", (3,))),
    ([1], lambda m: m.part.thing.append(2)),
    ([1, 2, 3], lambda m: m.part.thing.sort(reverse=True)),
    (deque([1, 2]), lambda m: m.part.thing.rotate()),
    ({"a": 1}, lambda m: m.part.thing.update(b=2)),
    ({"a": 1, "b": 2}, lambda m: m.part.thing.pop("a")),
    (OrderedDict(a=1, b=2), lambda m: m.part.thing.move_to_end("a")),
    (defaultdict(list), lambda m: m.part.thing["x"].append(1)),
    (Counter("abc"), lambda m: m.part.thing.update("cde")),
    ({1, 2}, lambda m: m.part.thing.add(3)),
    ([{"deep": [1]}], lambda m: m.part.thing[0]["deep"].append(2)),
    (([1], 2), lambda m: m.part.thing[0].append(3)),
    (Box(x=1), lambda m: setattr(m.part.thing, "x", 2)),
    (Box(), lambda m: setattr(m.part.thing, "new", 2)),
    (Box(inner=Box(rows=[1])), lambda m: m.part.thing.inner.rows.clear()),
    (Slots(), lambda m: setattr(m.part.thing, "x", 2)),
    (Slots(), lambda m: setattr(m.part.thing, "later", 2)),
    (Slots(), lambda m: delattr(m.part.thing, "x")),
    (Slots(), lambda m: m.part.thing.rows.append(2)),
    (Counted(), lambda m: setattr(m.part.thing, "hits", 2)),
    (Counted(), lambda m: m.part.thing.__setitem__("b", 2)),
    (random.Random(1), lambda m: m.part.thing.random()),
    (np.random.default_rng(1), lambda m: m.part.thing.random()),
    (np.random.Generator(np.random.MT19937(1)), lambda m: m.part.thing.random()),
    (np.random.RandomState(1), lambda m: m.part.thing.rand()),
    (np.arange(6.0).reshape(2, 3), lambda m: m.part.thing.__setitem__((0, 1), 7)),
    ([np.array(1), np.ones(3, bool), np.float64(1)], lambda m: m.part.thing[0].__iadd__(2)),
    (bytearray(b"ab"), lambda m: m.part.thing.extend(b"c")),
    (SimpleNamespace(x=1), lambda m: setattr(m.part.thing, "x", 2)),
    (argparse.Namespace(x=1), lambda m: setattr(m.part.thing, "x", 2)),
    (SobolEngine(2, scramble=True, seed=1), lambda m: m.part.thing.draw(3)),
    (torch.Generator().manual_seed(1), lambda m: torch.rand(3, generator=m.part.thing)),
    (torch.ones(3), change_tensor),
    (torch.ones(100_000), change_tensor),
    ([torch.ones(3)], lambda m: m.part.thing[0].mul_(2)),
    ([torch.ones(3)], lambda m: m.part.thing.append(torch.zeros(1))),
    (None, lambda m: setattr(m.part, "thing", torch.ones(1))),
    (None, lambda m: delattr(m.part, "thing")),
]


@pytest.mark.parametrize(("thing", "change"), CHANGES, ids=lambda value: str(value).split(" at 0x")[0][:30])
def test_a_change_is_undone_and_done(thing: Any, change: Callable[[Any], object]) -> None:
    """As before within, as after outside; also a second time, and after something has gone on since."""
    module = Holder(thing)
    picture = lambda: seen({k: v for k, v in vars(module.part).items() if k == "thing"})  # noqa: E731
    before = picture()
    effects = SideEffects(module, [])
    change(module)
    assert effects.conclude() is None
    after = picture()
    assert before != after
    for _ in range(2):
        with effects.undone():
            assert picture() == before
            change(module)
            assert picture() == after
        assert picture() == after


def test_a_container_that_was_replaced() -> None:
    """As a model does that takes what its blocks have collected: what runs again adds to the one that it knew."""
    module = Holder(Box(rows=[]))
    effects = SideEffects(module)
    module.part.thing.rows.append(1)
    assert effects.conclude() is None
    module.part.thing.rows = []
    with effects.undone():
        module.part.thing.rows.append(1)
    assert module.part.thing.rows == []


class CountsOnItsWeight(nn.Linear):
    """Keeps what it counts where its weight is: in attributes that the first forward sets."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        if not hasattr(weight, "average"):
            weight.average = torch.zeros(2)
        weight.average.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x - weight.average.clone()) * weight.calls


def test_attributes_of_weights() -> None:
    module, x = CountsOnItsWeight(2, 2), torch.randn(4, 2)
    for calls in (1, 2, 3):
        effects = SideEffects(module)
        output = module(x)
        assert effects.conclude() is None
        average = module.weight.average.clone()
        with effects.undone():
            assert torch.equal(module(x), output)
        assert module.weight.calls == calls
        assert torch.equal(module.weight.average, average)


def test_objects_stay_the_same_objects() -> None:
    """Who else holds a list or a tensor holds the one that the module holds."""
    rows, tensor = [1], torch.ones(2)
    module = Holder(Box(rows=rows, tensor=tensor))
    module.register_buffer("buffer", torch.zeros(2))
    buffer = module.buffer
    effects = SideEffects(module, [])
    rows.append(2)
    buffer.add_(1)
    effects.conclude()
    with effects.undone():
        assert module.part.thing.rows is rows
        assert module.buffer is not buffer
    assert module.part.thing.rows is rows
    assert module.buffer is buffer
    assert rows == [1, 2]
    assert buffer.tolist() == [1, 1]


@pytest.mark.parametrize(
    "view",
    [
        lambda stats: stats.unbind(0),
        lambda stats: stats.unbind(1)[1:3],
        lambda stats: [stats.t(), stats[1, 0]],
        lambda stats: [stats[1:, :1].expand(3, 5), stats.view(torch.uint8)[1:]],
        lambda stats: [stats[:1].detach(), stats[1:].data],
    ],
)
def test_views_stay_views(view: Callable[[Tensor], Any]) -> None:
    """A buffer that is written as a whole and read in parts, or the other way around, is one memory in the block."""
    module = Holder(torch.arange(12.0).reshape(3, 4)[:2])
    module.part.first, module.part.second = view(module.part.thing)
    module.part.apart = torch.zeros(3)
    names = ("thing", "first", "second", "apart")

    def read() -> list[Any]:
        return [getattr(module.part, name).tolist() for name in names]

    def change() -> list[Any]:
        module.part.thing.add_(1)
        module.part.second[(0,) * module.part.second.dim()] = 7
        module.part.apart -= 1
        return read()

    before = read()
    effects = SideEffects(module)
    after = change()
    assert effects.conclude() is None
    for _ in range(2):
        with effects.undone():
            assert read() == before
            assert change() == after
        assert read() == after


def test_a_leaf_requires_a_gradient_in_the_block() -> None:
    module = Holder(torch.ones(2, requires_grad=True))
    module.part.other = torch.ones(2)
    effects = SideEffects(module)
    assert effects.conclude() is None
    with effects.undone():
        assert module.part.thing.requires_grad
        assert not module.part.other.requires_grad


def test_statistics_without_a_version() -> None:
    """BatchNorm changes its buffers behind the version counter's back."""
    module = nn.Sequential(nn.BatchNorm1d(3))
    x = torch.randn(4, 3)
    effects = SideEffects(module, [x])
    version = module[0].running_mean._version
    expected = module(x)
    assert module[0].running_mean._version == version
    effects.conclude()
    after = [buffer.clone() for buffer in module.buffers()]
    with effects.undone():
        assert module[0].running_mean.count_nonzero() == 0
        assert torch.equal(module(x), expected)
    assert all(map(torch.equal, after, module.buffers()))


def test_modes_are_those_of_the_forward() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval()))
    modes = [part.training for part in module.modules()]
    effects = SideEffects(module, [])
    effects.conclude()
    module.eval()
    with effects.undone():
        assert [part.training for part in module.modules()] == modes
    assert not any(part.training for part in module.modules())


def hook_with_a_list(target: list[int]) -> Callable[..., None]:
    return lambda *args: target.append(len(target))


def note_into(target: list[int], *args: Any) -> None:
    target.append(len(target))


class Noting:
    def __init__(self, target: list[int]) -> None:
        self.target = target

    def hook(self, *args: Any) -> None:
        self.target.append(len(self.target))


WATCHED: dict[int, Noting] = {}  # what keeps objects alive that hooks only refer to


def hook_with_a_default(target: list[int]) -> Callable[..., None]:
    return lambda module, args, output, target=target: target.append(len(target))


def hook_with_a_keyword(target: list[int]) -> Callable[..., None]:
    return lambda *args, target=target: target.append(len(target))


def hook_with_an_attribute(target: list[int]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        hook.calls = getattr(hook, "calls", 0) + 1  # type: ignore[attr-defined]
        hook.target[1:] = [hook.calls]  # type: ignore[attr-defined]

    hook.target = target  # type: ignore[attr-defined]
    return hook


def hook_with_a_weak_reference(target: list[int]) -> Callable[..., None]:
    watched = WATCHED.setdefault(id(target), Noting(target))
    return partial(lambda reference, *args: reference().hook(), weakref.ref(watched))


def hook_with_a_weak_method(target: list[int]) -> Callable[..., None]:
    watched = WATCHED.setdefault(id(target), Noting(target))
    return partial(lambda reference, *args: reference()(), weakref.WeakMethod(watched.hook))


@pytest.mark.parametrize(
    "make",
    [
        hook_with_a_list,
        lambda target: partial(note_into, target),
        lambda target: Noting(target).hook,
        hook_with_a_default,
        hook_with_a_keyword,
        hook_with_an_attribute,
        hook_with_a_weak_reference,
        hook_with_a_weak_method,
    ],
)
def test_objects_that_hooks_write_to_are_found(make: Callable[[list[int]], Callable[..., None]]) -> None:
    """A function's variables, defaults and attributes, a partial's arguments, a method's object, weak references."""
    module, targets = nn.Sequential(nn.Linear(2, 2)), [[7], [8]]
    for target in targets:
        module[0].register_forward_hook(make(target))
    effects = SideEffects(module, [])
    module(torch.ones(1, 2))
    assert effects.conclude() is None
    with effects.undone():
        assert targets == [[7], [8]]
        module(torch.ones(1, 2))
    assert targets == [[7, 1], [8, 1]]


class Centers(nn.Module):
    """Has two units, and follows the first one's output, with a buffer and a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.norm = nn.Sequential(nn.BatchNorm1d(2, affine=False))
        self.units = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])

    def follow(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.steps += 1
        return self.norm(output) + self.steps


def by_a_method(model: Centers) -> None:
    model.units[0].register_forward_hook(model.follow)


def by_the_model_itself(model: Centers) -> None:
    model.units[0].model = [model]
    model.units[0].register_forward_hook(lambda module, *args: module.model[0].follow(module, *args))


@pytest.mark.parametrize("lead", [by_a_method, by_the_model_itself])
def test_buffers_and_parts_of_a_module_that_a_unit_leads_to(lead: Callable[[Centers], None]) -> None:
    """As a method of the model as a hook does; but what another unit holds is not looked at."""
    model, x = Centers(), torch.randn(4, 2)
    lead(model)
    unit, other = model.units
    effects = SideEffects(unit, units=set(map(id, model.units)))
    assert id(other.running_mean) not in effects.found
    output = unit(x)
    assert effects.conclude() is None
    after = {name: values.clone() for name, values in model.state_dict().items()}
    model.eval()
    with effects.undone():
        assert torch.equal(unit(x), output)
    assert not model.norm[0].training
    assert all(torch.equal(values, after[name]) for name, values in model.state_dict().items())


class Watches(nn.Module):
    """Registers a hook in its first forward, as models of transformers do that return what their layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_watched, self.seen = nn.Linear(2, 2), False, 0

    def _count(self, *args: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_watched:
            self.layer.register_forward_pre_hook(self._count)
            self.layer.register_forward_hook(self._count)
            self.is_watched = True
        return self.layer(x)


def test_hooks_that_a_forward_registers() -> None:
    """There are as many as before, and they are the same ones."""
    module = Watches()
    effects = SideEffects(module, [])
    module(torch.ones(1, 2))
    hooks = [*module.layer._forward_pre_hooks.items(), *module.layer._forward_hooks.items()]
    assert effects.conclude() is None
    with effects.undone():
        assert not module.layer._forward_hooks
        module(torch.ones(1, 2))
        assert module.seen == 2
    assert [*module.layer._forward_pre_hooks.items(), *module.layer._forward_hooks.items()] == hooks
    assert module.seen == 2
    module(torch.ones(1, 2))
    assert module.seen == 4


def test_a_hook_that_holds_a_buffer() -> None:
    """The buffer is the module's own all the same."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    mean, x = module[1].running_mean, torch.randn(4, 3)
    module[0].register_forward_hook(lambda *args: print(mean))
    effects = SideEffects(module, [])
    module(x)
    assert effects.conclude() is None
    after = mean.clone()
    with effects.undone():
        module(x)
    assert torch.equal(module[1].running_mean, after)


def test_a_cache_among_the_inputs() -> None:
    """What it binds anew is undone; memory of it that changes in place is not copied, and cannot be."""
    cache = Box(keys=None, count=0, fixed=torch.zeros(4))
    module = nn.Linear(2, 2)
    effects = SideEffects(module, [cache, 3, "text"])
    cache.keys, cache.count = torch.ones(2), 1
    assert effects.conclude() is None
    with effects.undone():
        assert (cache.keys, cache.count) == (None, 0)
    assert cache.count == 1
    effects = SideEffects(module, [cache])
    cache.fixed[0] = 1
    assert effects.conclude() == "changes a tensor of shape [4] in place"


def test_unchanged_attributes_are_not_remembered() -> None:
    """But for contents, which code between forward and backward may change: no copies of tensors."""
    module = Holder([torch.ones(100_000), Box(x=[1])])
    module.register_buffer("mask", torch.ones(100_000))
    given = Box(y=1)
    effects = SideEffects(module, [given])
    assert effects.conclude() is None
    assert not effects._held
    assert not effects._copies


@pytest.mark.parametrize("trusts_versions", [None, False])
def test_a_change_that_does_not_count(trusts_versions: bool | None) -> None:
    """A write to `.data` of a large tensor leaves its version as it is."""
    module = Holder(torch.ones(100_000))
    effects = SideEffects(module, trusts_versions=trusts_versions)
    module.part.thing.data.add_(1)
    assert effects.conclude() is None
    assert effects.trusts_versions is False
    with effects.undone():
        assert module.part.thing.sum() == 100_000
    assert module.part.thing.sum() == 200_000


def test_versions_are_trusted_where_nothing_speaks_against_it() -> None:
    """Then contents are not compared again, for which the host would wait."""
    module = Holder(torch.ones(100_000))
    first = SideEffects(module)
    module.part.thing.add_(1)
    assert first.conclude() is None
    assert first.trusts_versions is True
    later = SideEffects(module, trusts_versions=True)
    module.part.thing.data.add_(1)
    assert later.conclude() is None
    assert later._copies == {}


def test_circles_and_strangers() -> None:
    """An object that leads to itself, and objects that are not a user's state."""
    import logging

    box = Box(logger=logging.getLogger("test"))
    box.itself = box
    box.kind = Registered("Kind", (), {})
    box.random = random.SystemRandom()
    module = Holder([box])
    module.part.owner = [module]
    effects = SideEffects(module, [])
    box.new = 1
    assert effects.conclude() is None
    with effects.undone():
        assert not hasattr(box, "new")
    assert box.new == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_scripted_buffers_are_out_of_reach() -> None:
    module = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    assert SideEffects(module, []).conclude() == "has a scripted part with buffers"
    module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    assert SideEffects(module, []).conclude() is None


@pytest.mark.parametrize("hold", [itertools.cycle, lambda rows: (row for row in rows), lambda rows: [iter(rows)]])
def test_an_iterator_cannot_be_put_back(hold: Callable[[list[int]], Any], tmp_path: Path) -> None:
    """But one that a hook leads to, by a module or an object, is nobody's concern: that would be the Trainer's."""
    module, model = Holder(None), nn.Linear(2, 2)
    with (tmp_path / "log").open("w") as log:
        module.part.log = log
        model.rows = hold([1, 2])
        module.register_forward_hook(partial(print, model))
        module.register_forward_hook(partial(print, Box(trainer=Box(batches=hold([3])))))
        assert SideEffects(module).conclude() is None
    module.part.thing = model.rows
    assert SideEffects(module).conclude() == "has an iterator, which cannot be put back"
    assert SideEffects(nn.Linear(1, 1), [model.rows]).conclude() == "has an iterator, which cannot be put back"


def test_data_that_a_module_holds_is_not_looked_through() -> None:
    """Nor copied: without it a step can run again only if it is known to change nothing."""
    module = nn.Sequential(nn.Linear(2, 2))
    module.data = [(number, [number]) for number in range(30_000)]
    effects = SideEffects(module, [])
    assert effects.conclude() == "has more than 20000 objects in its attributes"


@pytest.mark.parametrize(("changes", "obstacle"), [(False, None), (True, r"changes a tensor of shape \[8\] in place")])
def test_a_very_large_tensor_is_not_copied(
    changes: bool, obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is changed, that cannot be undone."""
    module = nn.Sequential(nn.Linear(2, 2))
    module.memory, module.state = torch.zeros(8), torch.zeros(4)
    effects = SideEffects(module, [], largest=31)
    module.state += 1
    if changes:
        module.memory += 1
    said = effects.conclude()
    assert said is None if obstacle is None else re.fullmatch(obstacle, said or "")
    with effects.undone():
        assert not module.state.any()
