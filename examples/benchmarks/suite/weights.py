"""Random weights, made in seconds for billions of parameters, and the same for every system.

Libraries would draw each weight from its own distribution, on one core, which takes minutes. Here, nothing is
initialized while a model is built; afterwards, every matrix is filled with pieces of one block of noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from suite.networks import Network, default_dtype
from suite.workloads import Workload

_NOISE = 1 << 22  # numbers in the block
_SHIFT = 65_537  # how much later in the block the next weight begins, so that no two layers are alike
_DEVIATION = 0.02  # the usual standard deviation for transformers
_INITS = {"torch.nn.init", "transformers.initialization"}  # the latter's functions stand for the former's meanwhile
_DRAWS = {Tensor.normal_, Tensor.uniform_}


class _NoInit(TorchFunctionMode):
    """Skips the initialization of weights, because memory that is not touched costs nothing."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) in _INITS:
            return args[0] if args else kwargs["tensor"]
        if func in _DRAWS:  # `trunc_normal_` draws until all values are within bounds, and zeros are
            return args[0].zero_()
        return func(*args, **kwargs)


def build_network(workload: Workload) -> Network:
    """Build the workload's network on the host, with random weights in the workload's dtype."""
    with default_dtype(workload.weight_dtype), _NoInit():
        network = workload.network()
    fill(network)
    return network


@torch.no_grad()
def fill(module: nn.Module, seed: int = 0) -> None:
    """Fill matrices with noise, scales of norms with ones, and biases with zeros."""
    noise = _DEVIATION * torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed))
    blocks = {dtype: noise.to(dtype) for dtype in {parameter.dtype for parameter in module.parameters()}}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.dim() <= 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            _tile(parameter.view(-1), blocks[parameter.dtype], number * _SHIFT % _NOISE)


def _tile(memory: Tensor, block: Tensor, start: int) -> None:
    """Fill memory with repetitions of the block, beginning at `start` within it."""
    first = block[start : start + memory.numel()]
    memory[: len(first)] = first
    rest = memory[len(first) :]
    whole = rest.numel() // len(block) * len(block)
    rest[:whole].view(-1, len(block)).copy_(block.expand(whole // len(block), -1))
    rest[whole:] = block[: rest.numel() - whole]
