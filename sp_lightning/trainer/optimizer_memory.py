"""A warning before training if host memory will not hold gradients and optimizer state, which the first step makes.

When the strategy attaches, it checks what it allocates itself. Optimizers are known only after that, and if memory runs
out, the system ends the process without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.planning.estimate import STATE

_MAY_HAVE_MOMENTUM = ("SGD", "RMSprop")  # and then a buffer more


def warn_of_optimizer_memory(optimizers: Sequence[Optimizer], processes: int, warn: Callable[[str], None]) -> None:
    """Warn if gradients and optimizer state will not fit into what host memory has left.

    Args:
        optimizers: The optimizers of a run that begins.
        processes: How many processes on this machine have such optimizers.
        warn: Shows a warning.
    """
    free = available_host_memory()
    gradients = processes * sum(_trained_bytes(group) for optimizer in optimizers for group in optimizer.param_groups)
    state = processes * sum(map(_state_bytes, optimizers))
    if free is None or not state or gradients + state <= free:
        return
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    warn(
        f"Superpipeline: {names} will keep {readable_bytes(state)} of state in host memory, beside "
        f"{readable_bytes(gradients)} of gradients, and {readable_bytes(free)} are free. The system may end the "
        "process in the first steps. Use a machine with more memory, an optimizer with less state, "
        "`precision='bf16-true'`, or freeze weights."
    )


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that an optimizer has yet to make; 0 if it is not one of torch's."""
    name, total = type(optimizer).__name__, 0
    if name not in STATE or optimizer.state:
        return 0
    for group in optimizer.param_groups:
        buffers = STATE[name] + (name in _MAY_HAVE_MOMENTUM and group["momentum"] != 0)
        total += buffers * _trained_bytes(group)
    return total


def _trained_bytes(group: dict[str, Any]) -> int:
    parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
    return sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")
