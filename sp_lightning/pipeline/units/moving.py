"""Moves the tensors of a module that do not stream: they stay on the device.

Buffers do, because BatchNorm saves and changes these very tensors. So do tensors that a user's own `to` or `_apply`
moves: the anchors of a detector, the states of a metric, a teacher in a list. And so do parameters that cannot stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sp_lightning.pipeline.torch_private import contains_others, parts_of
from sp_lightning.pipeline.units.tree import Tree
from sp_lightning.pipeline.weights.quantized import move_parameter

HOST = torch.device("cpu")


def weights_on_accelerators(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the engine can manage, but that are not on the host."""
    masters = [weight.master for weight in Tree(root, ()).weights.values()]
    return [master for master in masters if master.device.type not in ("cpu", "meta")]


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Do what `root.to(device)` would do, except that parameters and their gradients do not move."""
    parameters = list(root.parameters())
    gradients = [parameter.grad for parameter in parameters]
    staying = set(map(id, [*parameters, *gradients]))
    # each entry holds the tensor itself, or another one might get its identity
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) in staying:
            return tensor
        if id(tensor) not in moved:
            # validation may come first, training later
            with torch.inference_mode(not is_lazy(tensor) and tensor.is_inference()):
                moved[id(tensor)] = tensor, tensor.to(device)
        return moved[id(tensor)][1]

    def apply(_: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return type(root)._apply(root, move, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    modules = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
    # parameters that consist of other tensors are hidden from `_apply`, which would exchange all that they are
    hidden: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and contains_others(parameter):
                hidden.append((module._parameters, name, parameter))
    for parameters_of_module, name, _ in hidden:
        parameters_of_module[name] = None
    vars(root)["_apply"] = apply
    try:
        root.to(device)
    finally:
        del vars(root)["_apply"]
        for parameters_of_module, name, parameter in hidden:
            parameters_of_module[name] = parameter


def move_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move parameters that are elsewhere, with their gradients; the Parameter objects stay the same."""
    for parameter in parameters:
        if parameter.device != device:
            with torch.inference_mode(parameter.is_inference()):
                move_parameter(parameter, device)


def copy_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters memory of their own, with their values."""
    for parameter in parameters:
        for part in parts_of(parameter):
            part.data = part.data.clone(memory_format=torch.preserve_format)
