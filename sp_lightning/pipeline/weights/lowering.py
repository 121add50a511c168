"""Which weights autocast lowers, so that they are sent in its dtype, at half the bytes: a table of layers.

The forward of a linear or convolutional layer of torch hands its weights to one operation, which casts them; those of
torch's other layers compute with them as they are. What layers of others do with theirs shows in the first step, in
which their leaves are watched (lowered.py, which `torch.compile` may look into; here it would find graphs to make).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sp_lightning.pipeline.torch_private import contains_others

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {layer.forward for layer in (nn.Linear, *_CONVOLUTIONS)}
_OF_OTHERS = {"transformers.pytorch_utils.Conv1D"}
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def weights_under_autocast(module: nn.Module, device_type: str) -> tuple[set[int], set[int]]:
    """Return which Parameters of a module autocast lowers, and which it may lower, by identity.

    Args:
        module: The module.
        device_type: The type of device whose autocast is on.
    """
    lowered, unknown, as_is = set[int](), set[int](), set[int]()
    # In evaluation it is a single operation, which gets the weights as they are; only CUDA's autocast turns it off.
    with_fast_path = [part for part in module.modules() if isinstance(part, _WITH_FAST_PATH)]
    in_fast_path = {part for each in with_fast_path for part in each.modules()} if device_type != "cuda" else set()
    for part in module.modules():
        is_table, is_unknown = is_lowered_layer(part), _is_unknown(part)
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            found = as_is
            if part not in in_fast_path and parameter.dtype is torch.float32 and not contains_others(parameter):
                if is_table and name in ("weight", "bias"):
                    found = lowered
                elif is_unknown and parameter.dim() > 1:  # what has one dimension is not worth it
                    found = unknown
            found.add(id(parameter))
    return lowered - unknown - as_is, unknown - as_is


def is_lowered_layer(module: nn.Module) -> bool:
    """Tell whether a module uses its weights in nothing but an operation that autocast lowers."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention reads its weights, never calls it
        return False
    if any(f"{cls.__module__}.{cls.__qualname__}" in _OF_OTHERS for cls in type(module).__mro__):
        return True
    return forward_of_class(module) in _FORWARDS and "forward" not in vars(module)


def _is_unknown(module: nn.Module) -> bool:
    is_torchs = module.__class__.__module__.startswith("torch.nn.modules.")
    return not is_torchs or isinstance(module, nn.MultiheadAttention | NonDynamicallyQuantizableLinear)


def forward_of_class(module: nn.Module) -> Any:
    """Return a module's `forward` as it stands in its class; `getattr` would run the descriptor of a scripted module.

    Not by `inspect.getattr_static`, which `torch.compile` would trace when it meets the engine in a model.
    """
    return next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
