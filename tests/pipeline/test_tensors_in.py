"""The search for tensors: it finds them in whatever Python allows, and says what it cannot look into."""

from __future__ import annotations

import array
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import logging
import pathlib
import queue
import random
import re
import threading
import types
import uuid
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import attrs
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.dlpack import to_dlpack

from sp_lightning.pipeline.operations import MOST_OBJECTS, tensors_in
from sp_lightning.pipeline.torch_private import alias_count, storage_key

INDEX = torch.arange(4)


@dataclass(slots=True)
class Slotted:
    value: Any

    def method(self) -> Any:
        return self.value


@attrs.define
class OfAttrs:
    value: Any


class Kept(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = [value]


def with_attribute(tensor: Tensor) -> Tensor:
    holder = torch.zeros(1)
    holder.kept = tensor
    return holder


def in_cycle(tensor: Tensor) -> list[Any]:
    holder: list[Any] = [tensor]
    holder.append(holder)
    return holder


def as_generator(tensor: Tensor) -> Iterator[int]:
    def generate() -> Iterator[int]:
        local = tensor
        yield 1
        yield len(local)

    generator = generate()
    next(generator)
    return generator


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple, list, dict": lambda tensor: ({"a": [tensor]},),
    "key": lambda tensor: {tensor: 1},
    "cycle": in_cycle,
    "set": lambda tensor: {1, tensor},
    "deque": lambda tensor: deque([tensor]),
    "ChainMap": lambda tensor: ChainMap({}, {"a": tensor}),
    "view of a dict": lambda tensor: {"a": tensor}.values(),
    "slots": Slotted,
    "attrs": OfAttrs,
    "namespace": lambda tensor: types.SimpleNamespace(a=tensor),
    "method": lambda tensor: Slotted(tensor).method,
    "builtin method": lambda tensor: [tensor].append,
    "partial": lambda tensor: functools.partial(torch.add, other=tensor),
    "closure": lambda tensor: lambda: tensor,
    "default": lambda tensor: lambda other=tensor: other,
    "iterator": lambda tensor: iter([tensor]),
    "itertools": lambda tensor: itertools.cycle([tensor]),
    "generator": as_generator,
    "map": lambda tensor: map(torch.neg, [tensor]),
    "exception": lambda tensor: ValueError(tensor),
    "queue": lambda tensor: (waiting := queue.SimpleQueue(), waiting.put(tensor))[0],
    "attribute of a tensor": with_attribute,
    "attribute of a module": Kept,
    "array over it": lambda tensor: tensor.detach().numpy()[1:],
    "array of objects": lambda tensor: numpy.array([None, Slotted(tensor)], dtype=object),
    "memoryview": lambda tensor: memoryview(tensor.detach().numpy()),
    "storage": lambda tensor: tensor.untyped_storage(),
    "typed storage": lambda tensor: tensor.storage(),
    "sparse": lambda tensor: torch.sparse_coo_tensor(torch.stack([INDEX, INDEX]), tensor, (4, 4)),
    "CSR": lambda tensor: torch.sparse_csr_tensor(torch.arange(5), INDEX, tensor, (4, 4)),
    "second of two tensors": lambda tensor: TwoTensor(torch.zeros(4), tensor),
}


@pytest.mark.filterwarnings("ignore:(Sparse CSR|TypedStorage|.*sparse)")
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_tensor_is_found(kind: str) -> None:
    tensor = torch.arange(4.0)
    hidden: list[Any] = []
    assert storage_key(tensor) in map(storage_key, tensors_in(HOLDERS[kind](tensor), hidden))
    assert not hidden


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Number(int):
    __slots__ = ()


def test_what_has_no_tensors_hides_none() -> None:
    ordinary = [
        None, True, 1, 1.5, 1j, "text", b"bytes", bytearray(2), ..., NotImplemented, range(3), slice(1), frozenset({1}),
        object(), Number(3), Color.RED, Level.LOW, int, Slotted, types, len, torch.tanh, test_a_tensor_is_found,
        datetime.datetime.now(datetime.UTC if hasattr(datetime, "UTC") else None), datetime.timedelta(1),
        decimal.Decimal(1), fractions.Fraction(1), uuid.uuid4(), pathlib.Path(), re.compile("a"), re.match("a", "a"),
        array.array("d", [1.0]), memoryview(b"a"), io.BytesIO(b"a"), random.Random(0), threading.Lock(),
        logging.getLogger("a"), weakref.ref(Slotted), iter(range(3)), test_a_tensor_is_found.__code__,
        numpy.float32(1), numpy.ones(2), numpy.array(["a"]), numpy.array([None, 1]), numpy.dtype("f4"),
        numpy.random.default_rng(0), numpy.random.RandomState(0), torch.float32, torch.device("cpu"), torch.strided,
        torch.Size([1]), torch.channels_last, torch.finfo(torch.float32), torch.Generator(), torch.ops.aten.add,
    ]  # fmt: skip
    hidden: list[Any] = []
    assert tensors_in(ordinary, hidden) == []
    assert not hidden


@pytest.mark.parametrize(
    "kind",
    [to_dlpack, lambda tensor: threading.local(), lambda tensor: contextvars.ContextVar("a"), torch.futures.Future],
)
def test_what_cannot_be_looked_into_is_said(kind: Callable[[Tensor], Any]) -> None:
    """Extensions, what is different in each thread, and all that nobody has thought of."""
    holder = torch.futures.Future() if kind is torch.futures.Future else kind(torch.ones(2))
    hidden: list[Any] = []
    tensors_in({"a": (holder,)}, hidden)
    assert hidden == [holder]


LARGE = [[0] * MOST_OBJECTS, dict.fromkeys(range(MOST_OBJECTS)), [[[n], [n]] for n in range(MOST_OBJECTS // 3)]]


@pytest.mark.parametrize("data", LARGE, ids=["list", "dict", "list of lists"])
def test_what_leads_to_too_much_is_said(data: Any) -> None:
    """A tensor near the top is found."""
    tensor, hidden = torch.ones(4), []
    assert tensors_in((data, [tensor]), hidden) == [tensor]
    assert hidden


def test_tensors_that_lie_in_a_storage_are_counted() -> None:
    tensor = torch.ones(4)
    assert alias_count(tensor) == 1
    views = [tensor[1:], tensor.detach()]
    assert alias_count(tensor) == 1 + len(views)
