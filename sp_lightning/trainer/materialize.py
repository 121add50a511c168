"""Materialization of models that were built on the meta device, in host memory."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from sp_lightning.trainer._namespace import Namespace


def materialize(module: nn.Module, lightning: Namespace) -> None:
    """Give every meta tensor of `module` memory on the CPU and have its owner fill it with `reset_parameters`.

    Parameter objects are kept (optimizers may already hold them), and so are ties: a weight shared by two modules is
    filled by the first one in `named_modules`.

    Raises:
        MisconfigurationException: If a module with meta tensors has no `reset_parameters`.
    """
    for name, owner in module.named_modules():
        tensors = [t for t in chain(owner.parameters(recurse=False), owner.buffers(recurse=False)) if t.is_meta]
        if not tensors:
            continue
        # torch.nn.MultiheadAttention is the only layer of torch whose method has an underscore.
        reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
        lightning.check(
            callable(reset),
            f"`{name or 'the model'}` ({type(owner).__name__}) has weights or buffers on the meta device and no "
            "`reset_parameters()` to fill them. Define that method, or build this module without "
            "`torch.device('meta')`.",
        )
        for tensor in tensors:
            _give_memory(tensor)
        assert reset is not None
        reset()


def _give_memory(tensor: Tensor) -> None:
    memory = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    # `.data = ` refuses to turn a meta tensor into a real one.
    torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
