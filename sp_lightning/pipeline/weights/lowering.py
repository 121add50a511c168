"""The search for weights that autocast lowers, so that they can be sent already lowered.

Under `bf16-mixed` autocast casts each Linear or Conv weight to bf16, autograd saves the copy, and a cache keeps every
copy until the region ends: streaming would save nothing. A weight that is only ever used through such a cast gives the
same bits when it is cast once on the host, and half the bytes travel. Without its cache, which Lightning switches off
from 2.5.5 on, autocast casts for each use, and the gradients of several uses add up in fp32: then only a weight that is
frozen, or used once for a graph, is sent lowered. Views are never in the cache: of several that are cast, no two may
overlap, and one that repeats elements (`query.expand(batch, -1)`) adds up their gradients, in fp32 as well.

How a weight is used is seen in its unit's first forward under autocast. A weight that is also used as it is (a tied
embedding, a norm, a layer in a region where autocast is off) is sent as it is, and so is one that is cast where no
graph is built, because a custom `autograd.Function` may use it as it is in its backward.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline.torch_private import decompose_under_mode, is_undecomposed, run_as_without_mode, storage_key
from sp_lightning.pipeline.weights.lowered import note_elements
from sp_lightning.pipeline.weights.operands import instances_in
from sp_lightning.pipeline.weights.weight import Twin, Weight

_LOWERED_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_LOWERED_FORWARDS = {layer.forward for layer in _LOWERED_LAYERS}


def is_lowered_layer(module: nn.Module) -> bool:
    """Tell whether a module uses its weights in nothing but an operation that autocast lowers."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention reads its weights, never calls it
        return False
    return forward_of_class(module) in _LOWERED_FORWARDS and "forward" not in vars(module)


class LoweringSpy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations on weights during a forward under autocast.

    Args:
        twins: Twins by the identity of their memory.
        device_type: The type of device whose autocast is watched.
        on_use_as_is: Called with a layer that is about to use its weights as they are: autocast is off, or it casts
            them anew for each use and this is not the first.
    """

    supports_higher_order_operators = True  # `flex_attention` is one operation here

    def __init__(
        self,
        twins: dict[int, Twin],
        device_type: str,
        on_use_as_is: Callable[[nn.Module], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins = twins
        self._device_type = device_type
        self._on_use_as_is = on_use_as_is
        self._dtype = torch.get_autocast_dtype(device_type)
        self.builds_graph = torch.is_grad_enabled()
        self.lowered: set[Weight] = set()
        self.used_as_is: set[Weight] = set()
        self._casts: dict[int, tuple[Weight, Tensor]] = {}
        self._casts_of: dict[Weight, list[range]] = {}
        self._called: set[nn.Module] = set()

    def __enter__(self) -> Any:
        """Start watching."""
        self._hook = register_module_forward_pre_hook(self._before_module)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        # the wrapper that `torch.compile(module)` returns warns that global hooks see it, too, which does no harm here
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        """Stop watching."""
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._warnings.__exit__(*exc_info)
        self._hook.remove()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, _WITH_FAST_PATH) and not torch.is_autocast_enabled():
            # torch only checks CUDA's autocast before it takes the fast path in evaluation, a single operation that
            # gets the weights as they are; it also checks their dtype
            keys = map(storage_key, module.parameters())
            self.used_as_is |= {self._twins[key].weight for key in keys if key in self._twins}
            for part in module.modules():
                self._on_use_as_is(part)
        if is_lowered_layer(module):
            once_more = self.builds_graph and module in self._called and not torch.is_autocast_cache_enabled()
            adds_gradients = once_more and any(parameter.requires_grad for parameter in module.parameters())
            self._called.add(module)
            if adds_gradients or not torch.is_autocast_enabled(self._device_type):
                self._on_use_as_is(module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note casts and other uses of weights, and run the operation as it is."""
        kwargs = kwargs or {}
        if is_undecomposed(func, self._device_type):  # its parts are watched instead
            return decompose_under_mode(func, args, kwargs, self)
        is_alias = is_view(func) and func is not torch.ops.aten.expand.default  # that may repeat with another batch
        weights = [] if is_alias else self._weights_among(args)
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self._dtype
        for weight in weights:
            self._note(weight, cast=args[0] if is_cast else None)
        output = run_as_without_mode(func, args, kwargs, self._device_type)
        if is_cast and weights and weights[0] in self.lowered:
            self._casts[storage_key(output)] = (weights[0], output)
        return output

    def _weights_among(self, args: Any) -> list[Weight]:
        found = []
        for tensor in tensors_among(args):
            key = storage_key(tensor)
            if key in self._twins:
                found.append(self._twins[key].weight)
            elif key in self._casts and torch.is_grad_enabled() != self.builds_graph:
                # inside of a custom autograd.Function, whose backward may use the weight as it is
                self.used_as_is.add(self._casts[key][0])
        return found

    def _note(self, weight: Weight, cast: Tensor | None) -> None:
        if weight.lowered:
            return
        if (
            cast is not None
            and weight.dtype is torch.float32
            and torch.is_grad_enabled() == self.builds_graph
            and self._note_cast(weight, cast)
        ):
            if self.builds_graph:
                self.lowered.add(weight)
        else:
            self.used_as_is.add(weight)

    def _note_cast(self, weight: Weight, operand: Tensor) -> bool:
        """Note a cast; tell whether gradients may leave it in the lower dtype."""
        is_first = note_elements(operand, self._casts_of.setdefault(weight, []))
        return is_first or not (operand.requires_grad and self.builds_graph)


@functools.cache
def is_view(func: Any) -> bool:
    """Tell whether an operation only makes an alias of its operand."""
    if isinstance(func, HigherOrderOperator):
        return False
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def tensors_among(args: Any) -> list[Tensor]:
    """Return all dense tensors among an operation's arguments."""
    return [tensor for tensor in instances_in(args, Tensor) if tensor.layout is torch.strided]


def forward_of_class(module: nn.Module) -> Any:
    """Return a module's `forward` as it stands in its class; `getattr` would run the descriptor of a scripted module.

    Not by `inspect.getattr_static`, which `torch.compile` would trace when it meets the engine in a model.
    """
    return next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
