"""Operands among the arguments of an operation. The meta device is the one that they are moved to."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.modules.host_inputs import call_on_device
from sp_lightning.pipeline.modules.one_device import HostMeetsDevice
from sp_lightning.pipeline.modules.operands import replace_instances

META = torch.device("meta")


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


def devices(*args: Tensor, **kwargs: Tensor) -> list[str]:
    """Call a unit with these inputs, and return where it gets them."""

    def unit(*args: Tensor, **kwargs: Tensor) -> list[str]:
        return [tensor.device.type for tensor in (*args, *kwargs.values())]

    mode = HostMeetsDevice()
    mode.weights = {id(WEIGHT)}
    found: list[str] = call_on_device(META, unit, args, kwargs, mode)
    return found


ROWS, INTEGERS, WEIGHT = torch.ones(2, 3), torch.ones(2, dtype=torch.long), torch.ones(3)


def test_inputs_of_units_go_to_the_device() -> None:
    assert devices(ROWS, mask=ROWS > 0) == ["meta", "meta"]
    assert devices(INTEGERS, INTEGERS) == ["meta", "meta"]
    assert devices(ROWS.to(META), ROWS) == ["meta", "meta"]


def test_lengths_numbers_and_weights_stay() -> None:
    assert devices(ROWS, INTEGERS) == ["meta", "cpu"]
    assert devices(ROWS.to(META), lengths=INTEGERS) == ["meta", "cpu"]
    assert devices(ROWS, torch.tensor(1.0), WEIGHT) == ["meta", "cpu", "cpu"]
