"""Users' hooks on weights, which get gradients on the host.

A hook may compute with what lies on the device, such as a mask that is a buffer, and with what lies on the host, such
as one that was made from the weight itself. In plain training both are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.modules.operands import instances_in, replace_instances

_MOVE_TO_ANOTHER = ("to", "type_as")


class OperandsOnOneDevice(TorchFunctionMode):
    """Moves the operands of each operation to the device of the first one, which an operation in place writes to."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, with operands on one device."""
        operation: tuple[Any, Any] = (args, kwargs or {})
        with without_torch_function():  # a guarded weight says that it is on the device
            devices = {id(operand): operand.device for operand in instances_in(operation, Tensor)}
        if len(set(devices.values())) > 1 and getattr(func, "__name__", "") not in _MOVE_TO_ANOTHER:
            first = next(iter(devices.values()))
            operation = replace_instances(
                operation, Tensor, lambda operand: operand if devices[id(operand)] == first else operand.to(first)
            )
        return func(*operation[0], **operation[1])


def run_hooks(hooks: Iterable[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    """Run hooks of `Tensor.register_hook`, and return what they make of a gradient, where it was."""
    for hook in hooks:
        with OperandsOnOneDevice():
            changed = hook(gradient)
        gradient = gradient if changed is None else changed.to(gradient.device)
    return gradient
