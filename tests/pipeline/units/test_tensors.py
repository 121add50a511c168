"""Tensors are found, and replaced, in whatever a module returns."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.units.tensors import replace_tensors, tensors_in

T = TypeVar("T")
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    """As a user writes one; transformers' are dictionaries as well."""

    first: Tensor
    rest: Any = None


@dataclass(slots=True)
class Slots(Generic[T]):
    """Has no dictionary, and may have nothing in a slot."""

    first: T
    other: T = field(init=False, repr=False)


class Results(dict[str, Any]):
    """A dictionary whose items are attributes, too, but for one; it refuses changes."""

    def __init__(self, tensor: Tensor, **items: Any) -> None:
        super().__init__(items)
        self.tensor = tensor

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError


class Rows(list[Any]):
    """A list of a class that pytree does not know."""


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [A]),
        (None, []),
        (3, []),
        ((A, None, [B, {"c": C}]), [A, B, C]),
        (Pair(A, "text"), [A]),
        (Output(A, [B, Output(C)]), [A, B, C]),
        ({"out": Output(A)}, [A]),
        (Output, []),
        (Slots(A), [A]),
        (Results(B, a=A), [A, B]),
        (Rows([A, Slots([B])]), [A, B]),
    ],
    ids=str,
)
def test_tensors_are_found_in_outputs(output: Any, expected: list[Tensor]) -> None:
    found = tensors_in(output)
    assert len(found) == len(expected)
    assert all(tensor is wanted for tensor, wanted in zip(found, expected, strict=True))


def test_tensors_are_replaced_in_outputs() -> None:
    """The structure and what is no tensor stay."""
    output = Pair([A, {"b": B}], Output(C, (A, "text")))
    changed = replace_tensors(output, lambda tensor: tensor + 1)
    assert type(changed) is Pair
    assert changed.left[0].tolist() == [2]
    assert changed.left[1]["b"].tolist() == [2, 2]
    assert changed.right.first.tolist() == [2, 2, 2]
    assert changed.right.rest[1] == "text"


def test_tensors_are_replaced_in_classes_that_torch_does_not_know() -> None:
    output = Rows([Slots(A), Results(A, a=A), A, "text"])
    assert replace_tensors(output, lambda tensor: tensor + 1) is output
    assert [tensor.tolist() for tensor in tensors_in(output)] == [[2]] * 4
    assert output[1].tensor is not A
    assert output[3] == "text"


class Holder:
    """An object as a module may return it, with a way back to itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = [tensor]
        self.module = nn.Linear(1, 1)
        self.holder = {"held": self}


def test_tensors_in_objects_are_found_and_replaced() -> None:
    """Not in modules that they refer to; and what needs no change stays the same object."""
    held = Holder(A)
    kept = held.tensors
    assert [tensor is A for tensor in tensors_in([held])] == [True]
    assert replace_tensors(held, lambda tensor: tensor) is held
    assert held.tensors is kept
    assert replace_tensors(held, lambda tensor: tensor + 1) is held
    assert held.tensors[0].tolist() == [2]
    assert held.holder["held"] is held
