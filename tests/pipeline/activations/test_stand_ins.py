"""Copies of the objects that a unit was given: what is copied, and what stands for itself."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.activations.stand_ins import StandIns


class Box:
    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content)


class Entries(list[Any]):
    """A container with an attribute."""

    name = "entries"


@dataclass(slots=True)
class Slots:
    rows: list[Any]


class Refuses:
    def __init__(self) -> None:
        self.content = [1]

    def __copy__(self) -> Any:
        raise TypeError


class Kind(enum.Enum):
    ONE = 1


class Pair(NamedTuple):
    first: list[int]
    second: int


def stand_in(value: Any, known: Any = ()) -> Any:
    (made,) = StandIns(frozenset(map(id, known))).of([value])
    return made


def test_a_graph_stays_behind() -> None:
    """Tensors are the same memory, with the same version; weights stand for themselves."""
    weight = nn.Parameter(torch.ones(2))
    computed = weight * 2
    made = stand_in(Box(states=[computed], weight=weight))
    (alias,) = made.states
    assert alias.grad_fn is None
    assert alias.requires_grad
    assert alias.data_ptr() == computed.data_ptr()
    with torch.no_grad():
        computed.add_(1)
    assert alias._version == computed._version
    assert made.weight is weight


def test_attributes_of_a_tensor_are_in_it() -> None:
    tensor = torch.ones(2)
    tensor.gain, tensor.log, tensor.itself = 0.5, [1], tensor
    made = stand_in([tensor])[0]
    tensor.gain, tensor.later = 2, 1
    tensor.log.append(2)
    assert (made.gain, made.log) == (0.5, [1])
    assert made.itself is made
    assert not hasattr(made, "later")


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ({"a": [1]}, lambda value: value["a"].append(2)),
        (OrderedDict(a=1), lambda value: value.update(b=2)),
        (defaultdict(list), lambda value: value["a"].append(2)),
        (deque([1], maxlen=3), lambda value: value.append(2)),
        ({1}, lambda value: value.add(2)),
        (([1], 2), lambda value: value[0].append(2)),
        (Pair([1], 2), lambda value: value.first.append(2)),
        (Entries([[1]]), lambda value: value[0].append(2)),
        (Box(inner=Box(rows=[1])), lambda value: value.inner.rows.append(2)),
        (Slots([1]), lambda value: value.rows.append(2)),
        (SimpleNamespace(rows=[1]), lambda value: value.rows.append(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_of_the_object_are_not_in_it(value: Any, change: Any) -> None:
    made, twin = stand_in(value), stand_in(value)
    assert type(made) is type(value)
    before = picture(twin)
    change(value)
    assert picture(value) != before
    assert picture(made) == before


def picture(value: Any) -> Any:
    if isinstance(value, Box):
        return {name: picture(item) for name, item in vars(value).items()}
    return repr(value)


def test_shared_objects_stay_shared() -> None:
    shared = [torch.ones(1)]
    box = Box(first=shared, second=shared)
    box.itself = box
    made, again = StandIns(frozenset()).of([box, shared])
    assert made.first is made.second is again
    assert made.first is not shared
    assert made.itself is made


@pytest.mark.parametrize(
    "value",
    [3, "text", None, torch.float32, torch.Generator(), nn.Linear(1, 1), Kind.ONE, Refuses(), Box, len, lambda: 0],
    ids=lambda value: type(value).__name__,
)
def test_objects_without_a_stand_in(value: Any) -> None:
    assert stand_in(value) is value


def test_objects_that_the_module_leads_to_have_no_stand_in() -> None:
    cache, own = [1], torch.ones(1)
    made = stand_in(Box(cache=cache, own=own, other=[1]), known=[cache, own])
    assert made.cache is cache
    assert made.own is own


def test_values_of_inference_stand_for_themselves() -> None:
    with torch.inference_mode():
        value: Tensor = torch.ones(1)
    assert stand_in([value])[0] is value
