"""Tensors are found, and replaced, in whatever a module returns."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.operands import replace_instances, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    """As a user writes one; transformers' are dictionaries as well."""

    first: Tensor
    rest: Any = None


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
        (Results(B, a=A), [A, B]),
        (Rows([A, Output([B])]), [A, B]),
    ],
    ids=str,
)
def test_tensors_are_found_in_outputs(output: Any, expected: list[Tensor]) -> None:
    found = tensors_in(output)
    assert len(found) == len(expected)
    assert all(tensor is wanted for tensor, wanted in zip(found, expected, strict=True))


def test_tensors_are_replaced_in_containers() -> None:
    """The structure and what is no tensor stay; objects are left alone."""
    output = Pair([A, {"b": B}], Output(C, (A, "text")))
    changed = replace_instances(output, Tensor, lambda tensor: tensor + 1)
    assert type(changed) is Pair
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [[2], [2, 2], [1, 1, 1], [1]]
    assert changed.right is output.right


class Holder:
    """An object as a module may return it, with a way back to itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = [tensor]
        self.module = nn.Linear(1, 1)
        self.holder = {"held": self}


def test_tensors_in_objects_are_found_once() -> None:
    """Not in modules that they refer to."""
    assert [tensor is A for tensor in tensors_in([Holder(A)])] == [True]
