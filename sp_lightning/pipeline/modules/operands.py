"""Operands of an operation: finding them among its arguments, in containers, too, replacing and moving them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor

from sp_lightning.pipeline._private import without_torch_function

_CONTAINERS = (list, tuple, dict)


def instances_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield the instances of a class among an operation's arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, kind):
                yield item
            elif isinstance(item, _CONTAINERS):  # mostly, it is neither, and a generator for it would be a waste
                yield from instances_in(item, kind)


def replace_instances(value: Any, kind: type, substitute: Callable[[Any], Any]) -> Any:
    """Return an operation's arguments with the instances of a class replaced; containers without any stay the same."""
    if isinstance(value, kind):
        return substitute(value)
    if isinstance(value, list | tuple):
        items = [replace_instances(item, kind, substitute) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        new_items = {key: replace_instances(item, kind, substitute) for key, item in value.items()}
        if all(new_items[key] is item for key, item in value.items()):
            return value
        replaced = copy(value)  # it may be of another class, such as the outputs of transformers' models
        for key, item in new_items.items():
            replaced[key] = item
        return replaced
    return value


def run_on(
    device: torch.device,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stays: Callable[[Tensor], bool] = lambda operand: False,
) -> Any:
    """Run an operation with copies of its operands on a device; what it writes to a copy is written back.

    Args:
        device: The device.
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        stays: Tells which operands are not moved.
    """
    copies: list[tuple[Tensor, Tensor]] = []

    def bring(operand: Tensor) -> Tensor:
        with without_torch_function():
            if operand.device == device or stays(operand):
                return operand
        copies.append((operand, _copy(operand, device)))
        return copies[-1][1]

    args, kwargs = replace_instances((args, kwargs), Tensor, bring)
    result = func(*args, **kwargs)
    for operand, copied in copies:
        if copied._version:  # `out=`, an embedding that bounds its rows
            with torch.no_grad():
                operand.copy_(copied)
    return result


def _copy(operand: Tensor, device: torch.device) -> Tensor:
    builds_graph = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(builds_graph):  # tensors of inference have no version
        return operand.to(device)
