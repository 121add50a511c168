"""Which weights autocast lowers, so that they are sent in its dtype, at half the bytes: a table of layers.

The forward of a linear or convolutional layer of torch hands its weights to one operation, which casts them; those of
torch's other layers compute with them as they are. What layers of others do with theirs shows in the first step, in
which their leaves are watched (lowered.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sp_lightning.pipeline.torch_private import contains_others

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_FORWARDS = {layer.forward for layer in _LAYERS}
_OF_OTHERS = {"transformers.pytorch_utils.Conv1D"}
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def weights_under_autocast(module: nn.Module, device_type: str) -> tuple[set[int], set[int]]:
    """Return which Parameters of a module autocast lowers, and which may be lowered, by identity.

    Args:
        module: The module.
        device_type: The type of device whose autocast is on.
    """
    lowered: set[int] = set()
    unknown: set[int] = set()
    as_is: set[int] = set()
    with_fast_path = {part for part in module.modules() if isinstance(part, _WITH_FAST_PATH)}
    # In evaluation it is a single operation, which gets the weights as they are; only CUDA's autocast turns it off.
    parts_of_it = {part for each in with_fast_path for part in each.modules()} if device_type != "cuda" else set()
    for part in module.modules():
        for name, parameter in _weights_of(part):
            if part in parts_of_it or parameter.dtype is not torch.float32 or contains_others(parameter):
                as_is.add(id(parameter))
            elif is_lowered_layer(part) and name in ("weight", "bias"):
                lowered.add(id(parameter))
            elif _is_unknown(part) and parameter.dim() > 1:  # what has one dimension is not worth it
                unknown.add(id(parameter))
            else:
                as_is.add(id(parameter))
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


def _weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


def forward_of_class(module: nn.Module) -> Any:
    """Return a module's `forward` as it stands in its class; `getattr` would run the descriptor of a scripted module.

    Not by `inspect.getattr_static`, which `torch.compile` would trace when it meets the engine in a model.
    """
    return next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
