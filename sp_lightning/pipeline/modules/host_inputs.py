"""Inputs of units that hooks call: code that asks a weight where to place them is told the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sp_lightning.pipeline.modules.one_device import HostMeetsDevice
from sp_lightning.pipeline.modules.operands import instances_in, run_on


def call_on_device(
    device: torch.device,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: HostMeetsDevice,
) -> Any:
    """Call a unit with inputs on the device, where they are in plain training.

    Integers beside other inputs stay, as they may be lengths, which are on the host there, too. If they are not,
    operations within the call that torch refuses because of them run again with all operands on one device.

    Args:
        device: The device.
        call: Calls the unit.
        args: The positional arguments.
        kwargs: The keyword arguments.
        mode: What brings operands together, and is otherwise paused within units.
    """

    def may_be_anywhere(tensor: Tensor) -> bool:
        return id(tensor) in mode.weights or tensor.dim() == 0

    inputs = [tensor for tensor in instances_in((args, kwargs), Tensor) if not may_be_anywhere(tensor)]
    integers = [tensor for tensor in inputs if _is_of_integers(tensor)]
    integers_stay = len(integers) < len(inputs) and any(tensor.device.type == "cpu" for tensor in integers)

    def stays(tensor: Tensor) -> bool:
        return may_be_anywhere(tensor) or (integers_stay and _is_of_integers(tensor))

    with nullcontext() if integers_stay else mode.paused():
        return run_on(device, call, args, kwargs, stays)


def _is_of_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
