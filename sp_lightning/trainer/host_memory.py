"""What callbacks and optimizers keep in host memory beside the weights: their averages, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning.pipeline import available_host_memory, readable_bytes
from sp_lightning.planning.estimate import STATE
from sp_lightning.trainer._namespace import Namespace

_MAY_HAVE_MOMENTUM = ("SGD", "RMSprop")  # and then a buffer more


def keep_averages_on_host(callbacks: Iterable[Any], lightning: Namespace) -> None:
    """Have callbacks that average weights keep their copy of the model where its weights are, not on the device.

    Args:
        callbacks: The Trainer's callbacks, before their `setup`, which makes the copy.
        lightning: The namespace of Lightning in use.

    Raises:
        MisconfigurationException: If the user wants a copy on the device.
    """
    for callback in callbacks:
        if isinstance(callback, lightning.averaging):
            chosen = callback._device
            lightning.check(
                chosen is None or torch.device(chosen).type == "cpu",
                f"`{type(callback).__name__}(device={chosen!r})` keeps a second copy of the whole model on the device, "
                "but `strategy='superpipeline'` keeps weights in host memory. Leave `device` out, or set it to 'cpu'.",
            )
            callback._device = torch.device("cpu")  # Lightning would take the module's `device`, where no weight is


def warn_of_optimizer_memory(optimizers: Sequence[Optimizer], processes: int, lightning: Namespace) -> None:
    """Warn, before the first step makes them, if gradients and optimizer state will not fit into host memory.

    If memory runs out, the system ends the process without an error.

    Args:
        optimizers: The optimizers of a run that begins.
        processes: How many processes on this machine have such optimizers.
        lightning: The namespace of Lightning in use.
    """
    free = available_host_memory()
    gradients = processes * sum(_trained_bytes(group) for optimizer in optimizers for group in optimizer.param_groups)
    state = processes * sum(map(_state_bytes, optimizers))
    if free is None or not state or gradients + state <= free:
        return
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    lightning.warn(
        f"Superpipeline: {names} will keep {readable_bytes(state)} of state in host memory, beside "
        f"{readable_bytes(gradients)} of gradients, and {readable_bytes(free)} are free. The system may end the "
        "process in the first steps. Use a machine with more memory, an optimizer with less state, "
        "`precision='bf16-true'`, or freeze weights."
    )


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that an optimizer has yet to make; 0 if it is not one of torch's."""
    name = type(optimizer).__name__
    if name not in STATE or optimizer.state:
        return 0
    return sum(
        (STATE[name] + (name in _MAY_HAVE_MOMENTUM and group["momentum"] != 0)) * _trained_bytes(group)
        for group in optimizer.param_groups
    )


def _trained_bytes(group: dict[str, Any]) -> int:
    parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
    return sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")
