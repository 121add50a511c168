"""Units that live on the device, with weights, gradients and optimizer state (`resident_optimizer`).

Calls of such a unit, and what autograd saves of them, are managed like those of any other. But its parameters are plain
parameters on the device, as in plain training: autograd accumulates their gradients there, and the optimizer's own code
steps them there, while all others are stepped on the host. Units move to the device and back between steps, without
losing anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.weights.quantized import is_quantized, move_parameter


def move(parameters: Collection[nn.Parameter], device: torch.device, optimizers: Iterable[Optimizer]) -> None:
    """Move parameters with their gradients and optimizer state; the Parameter objects stay the same."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            if is_quantized(parameter):
                move_parameter(parameter, device, copy=True)
                continue
            # copied even if it is there already, so that memory shared with other weights is freed; and both before
            # either is set, as memory may run out here: no gradient must be lost
            data = parameter.data.to(device, copy=True)
            gradient = None if parameter.grad is None else parameter.grad.to(device, copy=True)
            parameter.data, parameter.grad = data, gradient
        for optimizer in optimizers:
            move_state(optimizer, parameters)


def move_state(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
    """Move the optimizer state of parameters to their device, as `Optimizer.load_state_dict` does."""
    moving = set(map(id, parameters))
    for group in optimizer.param_groups:
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in [p for p in group["params"] if id(p) in moving and p in optimizer.state]:
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or counts_on_device):
                    state[key] = value.to(parameter.device, copy=True)


def is_elsewhere(state: dict[str, Any], parameter: nn.Parameter) -> bool:
    """Tell whether the optimizer's state of a parameter is not on the parameter's device."""
    tensors = [value for key, value in state.items() if isinstance(value, Tensor) and key != "step"]
    return any(value.device != parameter.device for value in tensors)


def state_bytes(optimizers: Iterable[Optimizer], parameter: nn.Parameter) -> int:
    """Return the bytes of optimizer state that a parameter has."""
    kept = [value for optimizer in optimizers for value in optimizer.state.get(parameter, {}).values()]
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))
