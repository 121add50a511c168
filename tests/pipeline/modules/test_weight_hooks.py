"""Users' hooks on weights: what they compute with is brought to one device. The meta device is the other one here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_lightning.pipeline.modules.weight_hooks import OperandsOnOneDevice, run_hooks

HERE, THERE = torch.ones(3), torch.ones(3, device="meta")


def test_operands_go_where_the_first_one_is() -> None:
    """Also those in containers, numbers in tensors, and those that are named."""
    with pytest.raises(RuntimeError, match="device"):
        torch.cat([THERE, HERE])
    with OperandsOnOneDevice():
        assert (THERE * HERE).device.type == "meta"
        assert torch.cat([THERE, HERE]).device.type == "meta"
        assert torch.addcmul(THERE, HERE, HERE, value=2).device.type == "meta"
        assert torch.mul(THERE, other=torch.tensor(2.0)).device.type == "meta"
        assert (HERE * HERE).device.type == "cpu"


def test_operations_in_place_write_where_they_should() -> None:
    """The first operand is the one that is written to."""
    there = THERE.clone()
    with OperandsOnOneDevice():
        same = there
        same += HERE
    assert same is there
    assert there._version == 1


def test_moves_to_another_device_are_what_was_asked_for() -> None:
    """``gradient.to(mask)`` goes to the mask's device."""
    with OperandsOnOneDevice():
        assert HERE.to(THERE).device.type == "meta"
        assert HERE.type_as(THERE).device.type == "meta"


def test_hooks_run_in_order_and_may_only_look() -> None:
    """What one returns is what the next one gets."""
    seen: list[Tensor] = []
    changed = run_hooks([lambda gradient: gradient * 2, seen.append, lambda gradient: gradient + 1], HERE)
    assert changed.tolist() == [3.0, 3.0, 3.0]
    assert [each.tolist() for each in seen] == [[2.0, 2.0, 2.0]]
