"""Operands on two devices are brought to one. The meta device is the other one here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sp_lightning.pipeline.modules.one_device import HostMeetsDevice, OperandsOnOneDevice

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


def test_what_torch_does_not_refuse_stays_as_it_is() -> None:
    """Numbers and indices on the host do not draw the rest to the host, and what asks for a move gets one."""
    with OperandsOnOneDevice():
        assert (torch.tensor(2.0) * THERE).device.type == "meta"
        assert THERE[torch.tensor([0, 2])].device.type == "meta"
        assert HERE.to(THERE).device.type == "meta"
        assert HERE.type_as(THERE).device.type == "meta"


def test_other_errors_are_torchs() -> None:
    """Of operands on one device, of what works across devices, and of operations that are torch's own."""
    with OperandsOnOneDevice():
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2) + HERE
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
            THERE.to(HERE)
        with pytest.raises(RuntimeError, match="device"):
            torch._weight_norm(torch.ones(3, 3), torch.ones(3, 1, device="meta"))


def test_what_is_made_like_a_weight_stays_where_it_is() -> None:
    """In plain training it is there. Other tensors on the host are on the host there, too."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    mode = HostMeetsDevice()
    mode.weights = {id(weight)}
    mode.enable()
    try:
        assert THERE.type_as(weight).device.type == "meta"
        assert THERE.to(weight).dtype == torch.float64
        assert THERE.to(weight, copy=True) is not THERE
        with pytest.raises(NotImplementedError, match="meta"):
            THERE.to(HERE)
        with mode.paused(), pytest.raises(NotImplementedError, match="meta"):
            THERE.to(weight)
    finally:
        mode.disable()
    with pytest.raises(RuntimeError, match="device"):
        THERE * HERE
