"""Operands among the arguments of an operation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from sp_lightning.pipeline.weights.operands import replace_instances


class Pair(NamedTuple):
    left: Any
    right: Any


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers' models: a dictionary that can also be indexed by numbers."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def test_containers_are_of_the_same_class_afterwards() -> None:
    value = [Pair(1, (2, "a")), Output(first=3, second={"b": 4})]
    replaced = replace_instances(value, int, lambda number: number + 10)
    assert replaced == [Pair(11, (12, "a")), Output(first=13, second={"b": 14})]
    assert replaced[1][0] == 13
    assert value[1][0] == 3


def test_containers_with_nothing_to_replace_are_the_same_objects() -> None:
    """A module may add to a list that it is given."""
    notes: list[str] = []
    args = replace_instances((1, notes, {"more": notes}), int, lambda number: number + 1)
    assert args == (2, [], {"more": []})
    assert args[1] is notes
    assert args[2]["more"] is notes
