"""Frozen quantized layers with trained ones beside them, of the two kinds that libraries have, in miniature.

torchao's weights are tensor subclasses that contain plain tensors, which `F.linear` and `Module.to` know how to handle.
Those of bitsandbytes are packed Parameters with a quantization state, which the Parameter's own `to` moves along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from .blocks import LoRALinear, chain, rows
from .case import Case

_LEVELS = 127
_aten = torch.ops.aten
_APPLIED_TO_BOTH = {
    _aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.t.default,
    _aten.transpose.int,
}  # fmt: skip


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / _LEVELS
    return (weight / scale).round().to(torch.int8), scale


class Int8Weight(Tensor):
    """Integers and a scale for each row, as one tensor: autograd saves it, or a view of it, as a whole."""

    integers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(
            cls, integers.shape, strides=integers.stride(), dtype=scale.dtype, device=integers.device
        )

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers = integers
        self.scale = scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Quantize a weight."""
        return cls(*_quantize(weight.detach()))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> Int8Weight:
        return cls(**inner)

    def dequantize(self) -> Tensor:
        """Return the weight that it stands for."""
        return self.integers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _APPLIED_TO_BOTH:
            first, *others = args
            kept = {key: value for key, value in kwargs.items() if key != "dtype"}
            result = cls(func(first.integers, *others, **kept), func(first.scale, *others, **kwargs))
            return return_and_correct_aliasing(func, args, kwargs, result)
        if func is _aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            args[0].integers.copy_(args[1].integers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs))
        return func(*args, **kwargs)


class Int8Linear(nn.Linear):
    """A linear layer with a frozen `Int8Weight`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter(Int8Weight.of(layer.weight), requires_grad=False)


@dataclass
class State:
    """What else it takes to restore a packed weight."""

    scale: Tensor

    def to(self, device: torch.device) -> None:
        self.scale = self.scale.to(device)


class PackedWeight(nn.Parameter):
    """Integers, with their scale in an attribute."""

    state: State

    @staticmethod
    def __new__(cls, integers: Tensor, state: State) -> PackedWeight:
        packed = Tensor._make_subclass(cls, integers, False)
        packed.state = state
        return packed

    def to(self, *args: Any, **kwargs: Any) -> PackedWeight:  # type: ignore[override]
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.state.to(device)
        return PackedWeight(super().to(*args, **kwargs), self.state)


class _MatMul(torch.autograd.Function):
    """A product that holds on to its packed operand without telling autograd, as that of bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: State) -> Tensor:
        ctx.packed, ctx.state = packed.view(packed.shape), state
        return F.linear(x, packed * state.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient @ (ctx.packed * ctx.state.scale).to(gradient.dtype), None, None


class PackedLinear(nn.Linear):
    """A linear layer with a frozen `PackedWeight`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        integers, scale = _quantize(layer.weight.detach())
        self.weight = PackedWeight(integers, State(scale))

    def forward(self, x: Tensor) -> Tensor:
        return _MatMul.apply(x, self.weight.data, self.weight.state)  # type: ignore[no-any-return]


def _build(quantize: Callable[[nn.Linear], nn.Linear]) -> nn.Module:
    model = chain(4)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRALinear(quantize(block.up)), LoRALinear(quantize(block.down))
    return model


CASES = [
    Case(f"{name} weights", partial(_build, quantize), rows, autocast=True)
    for name, quantize in {"int8": Int8Linear, "packed": PackedLinear}.items()
]

torch.serialization.add_safe_globals([Int8Weight])  # as libraries do with their classes
