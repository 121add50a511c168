"""Which weights autocast lowers, so that they can be sent already lowered.

Under `bf16-mixed` autocast casts each Linear or Conv weight to bf16, autograd saves the copy, and a cache keeps every
copy until the region ends: streaming would save nothing. A weight that is only ever used through such a cast gives
the same bits when it is cast once on the host, and half the bytes travel.

Layers of torch whose forward is nothing but such an operation are known from the start. Other weights are watched in
their unit's first forward under autocast. A weight that is also used as it is (a tied embedding, a norm, a layer in a
region where autocast is off) stays as it is, and so does one that is cast where no graph is built, because a custom
`autograd.Function` may use it as it is in its backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline._private import storage_key
from sp_lightning.pipeline.units import Unit
from sp_lightning.pipeline.weights import Twin, Weight

_LOWERED_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_LOWERED_FORWARDS = {layer.forward for layer in _LOWERED_LAYERS}


def is_lowered_layer(module: nn.Module) -> bool:
    """Whether a module computes with its weights in nothing but an operation that autocast lowers."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention reads its weights, never calls it
        return False
    forward = inspect.getattr_static(type(module), "forward")
    return forward in _LOWERED_FORWARDS and "forward" not in vars(module)


def known_to_be_lowered(root: nn.Module, units: Iterable[Unit]) -> list[Weight]:
    """Weights that only layers with a lowered operation own."""
    elsewhere = {
        id(parameter)
        for module in root.modules()
        if not is_lowered_layer(module)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    owned = {
        id(parameter)
        for module in root.modules()
        if is_lowered_layer(module)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return [
        weight
        for unit in units
        for weight in unit.weights
        if weight.master.dtype is torch.float32 and id(weight.master) in owned - elsewhere
    ]


class LoweringSpy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations on weights during a forward under autocast.

    Args:
        twins: Twins by the identity of their memory.
        assumed: Masters, by identity, that were taken for lowered without having been watched yet.
        device_type: The device whose autocast is watched.
        on_region_without_autocast: Called with a layer that is about to compute while autocast is off.
    """

    def __init__(
        self,
        twins: dict[int, Twin],
        assumed: set[int],
        device_type: str,
        on_region_without_autocast: Callable[[nn.Module], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins = twins
        self._assumed = assumed
        self._device_type = device_type
        self._on_region_without_autocast = on_region_without_autocast
        self._dtype = torch.get_autocast_dtype(device_type)
        self.builds_graph = torch.is_grad_enabled()
        self._inside_lowered_layer = 0
        self.lowered: set[Weight] = set()
        self.used_as_is: set[Weight] = set()

    def __enter__(self) -> Any:
        """Watch."""
        self._hooks = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        """Stop watching."""
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if is_lowered_layer(module):
            self._inside_lowered_layer += 1
            if not torch.is_autocast_enabled(self._device_type):
                self._on_region_without_autocast(module)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_lowered_layer(module):
            self._inside_lowered_layer -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note casts and other uses of weights; the operation itself is left alone."""
        kwargs = kwargs or {}
        if not is_view(func):
            for tensor in tensors_among(args):
                twin = self._twins.get(storage_key(tensor))
                if twin is not None:
                    self._note(twin.weight, func, kwargs)
        return func(*args, **kwargs)

    def _note(self, weight: Weight, func: Any, kwargs: dict[str, Any]) -> None:
        if weight.lowered:
            if id(weight.master) in self._assumed and not self._inside_lowered_layer:
                self.used_as_is.add(weight)
            return
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self._dtype
        if is_cast and weight.master.dtype is torch.float32 and torch.is_grad_enabled() == self.builds_graph:
            if self.builds_graph:
                self.lowered.add(weight)
        else:
            self.used_as_is.add(weight)


def is_view(func: Any) -> bool:
    """Whether an operation only makes an alias of its operand."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def tensors_among(value: Any) -> list[Tensor]:
    """All dense tensors among an operation's arguments."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_among(item)]
    return []
