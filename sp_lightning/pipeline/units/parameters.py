"""Parameters of a module tree: which of them the engine can manage, and which it refuses.

To manage a parameter is to point it to memory of the engine's own, which must be possible without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sp_lightning.pipeline.torch_private import parts_of
from sp_lightning.pipeline.weights.buffers import is_dense
from sp_lightning.pipeline.weights.quantized import is_quantized


def named_own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield full name, owner and parameter for every place of every parameter (shared ones once per place)."""
    for module_name, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{module_name}.{key}" if module_name else key, module, parameter


def check_parameter(name: str, parameter: nn.Parameter, on_meta: bool) -> None:
    """Refuse a parameter that has no values.

    Args:
        name: Its full name.
        parameter: The parameter.
        on_meta: Whether it may be on the meta device, because nothing will be computed with it.

    Raises:
        ValueError: If it has no shape yet, or no values.
    """
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"Parameter {name!r} has no shape yet (a lazy module). Run one forward on example data before the model is "
            "given to superpipeline."
        )
    if parameter.device.type == "meta" and on_meta:
        return
    if parameter.device.type == "meta":
        raise ValueError(
            f"Parameter {name!r} is on the meta device and has no values. Materialize the model on the CPU first "
            "(`module.to_empty(device='cpu')` and then load or initialize its weights)."
        )


def is_manageable(owner: nn.Module, parameter: nn.Parameter) -> bool:
    """Tell whether the engine can point a parameter to other memory: plain and dense, or quantized."""
    if isinstance(owner, torch.jit.ScriptModule):
        return False
    return is_quantized(parameter) or (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and parameter.layout is torch.strided
        and is_dense(parameter)
    )


def weights_on_accelerators(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the engine can manage, but that are not on the host."""
    named = named_own_parameters(root)
    elsewhere = [p for _, owner, p in named if p.device.type not in ("cpu", "meta") and is_manageable(owner, p)]
    tied = tied_by_memory(root) if elsewhere else ()
    return [parameter for parameter in dict.fromkeys(elsewhere) if id(parameter) not in tied]


def tied_by_memory(root: nn.Module) -> set[int]:
    """Find parameters that share memory with others or with buffers, as after `b.weight.data = a.weight.data`."""
    owners = [*root.parameters(), *root.buffers()]
    tensors = [(id(owner), part) for owner in owners for part in parts_of(owner) if _has_memory(part)]
    tied: set[int] = set()
    for device in {tensor.device for _, tensor in tensors}:
        furthest, reached = 0, 0
        for start, end, key in sorted((*_span(t), key) for key, t in tensors if t.device == device):
            if start < reached:
                tied |= {key, furthest}
            if end > reached:
                furthest, reached = key, end
    return tied


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor.data) is Tensor and tensor.layout is torch.strided
    return plain and not (is_lazy(tensor) or tensor.is_meta) and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins and ends, or its whole storage if the tensor has holes."""
    if is_dense(tensor):
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
