"""Weights that autocast lowers: they are sent in its dtype, at half the bytes.

Which ones these are shows in the first step, in which leaves tell how they are used. A leaf passes as the operand of
what autocast casts, once in each graph. Whatever else a program does with a lowered weight gets it in its own dtype at
once, which is how it is sent from then on. So numbers are those of plain autocast in every step.

Code that torch compiles shows nothing of the kind. In a model with such code, a table decides: the forward of a linear
or convolutional layer of torch hands its weights to one operation, which casts them. A leaf that it meets elsewhere is
an ordinary Parameter to it; so that it can be, this is one of the files that `torch.compile` may look into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sp_lightning.pipeline.torch_private import graph_task, in_backward, running_node, without_torch_function
from sp_lightning.pipeline.weights.leaf import EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.operands import OF_THE_DTYPE, instances_in, is_metadata, name_of, replace_instances

Weight: TypeAlias = Any  # weights make their leaves, and import this file

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {layer.forward for layer in (nn.Linear, *_CONVOLUTIONS)}
_OF_OTHERS = {"transformers.pytorch_utils.Conv1D"}
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

# What autocast casts on every device, and once, whatever the other operands are
_NAMES = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "multi_head_attention_forward",
)  # fmt: skip
_CASTING = {getattr(place, name) for place in (torch, Tensor, F) for name in _NAMES if hasattr(place, name)}
_OF_THE_LEAF = {"grad", "_version", "untyped_storage"}


def weights_of_known_layers(module: nn.Module) -> set[int]:
    """Return which Parameters of a module only layers of the table use, by identity."""
    lowered, others = set[int](), set[int]()
    for part in module.modules():
        is_known = is_lowered_layer(part)
        for name, parameter in part._parameters.items():
            is_cast = parameter is not None and parameter.dtype is torch.float32 and name in ("weight", "bias")
            (lowered if is_known and is_cast else others).add(id(parameter))
    return lowered - others


def is_lowered_layer(module: nn.Module) -> bool:
    """Tell whether a module uses its weights in nothing but an operation that autocast lowers."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention reads its weights, never calls it
        return False
    if any(f"{cls.__module__}.{cls.__qualname__}" in _OF_OTHERS for cls in type(module).__mro__):
        return True
    return forward_of_class(module) in _FORWARDS and "forward" not in vars(module)


def forward_of_class(module: nn.Module) -> Any:
    """Return a module's `forward` as it stands in its class; `getattr` would run the descriptor of a scripted module.

    Not by `inspect.getattr_static`, which `torch.compile` would trace when it meets the engine in a model.
    """
    return next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))


def weights_to_leave(module: nn.Module, device_type: str) -> set[int]:
    """Return which Parameters of torch's layers are not lowered whatever their leaves would tell, by identity.

    In evaluation, some layers are a single operation, which gets the weights as they are. Only CUDA's autocast turns it
    off; with leaves that tell how they are used, torch would compute other numbers without it.
    """
    parts = [part for part in module.modules() if isinstance(part, _WITH_FAST_PATH)]
    appended = [p for part in parts if isinstance(part, nn.MultiheadAttention) for p in (part.bias_k, part.bias_v)]
    in_fast_path = [p for part in parts for p in part.parameters()] if device_type != "cuda" else []
    return set(map(id, [*appended, *in_fast_path]))


guarded: dict[int, tuple[Any, Weight]] = {}
"""The guards of weights (guard.py) and the weights, by the identity of their masters: a leaf may outlive both."""


class LoweredParameter(EagerLeaf):
    """The leaf of a weight that is sent lowered, or in its own dtype as long as it is only watched."""

    __slots__ = ()

    @TwinParameter.data.getter  # type: ignore[attr-defined, untyped-decorator]
    def data(self) -> Tensor:
        """The values in the weight's own dtype: they may be written to, which the weight counts."""
        with without_torch_function():
            return self._as_is().detach()

    def _as_is(self) -> nn.Parameter:
        """Return the weight in its own dtype, which is this leaf if it is only watched."""
        guard, weight = guarded.get(id(self.master), (None, None))
        if guard is None or weight is None:
            return self
        guard.keep_as_is(weight)
        return self if self.dtype is weight.dtype else guard.serve(weight)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation with the lower values if that is right, else with the weight as it is."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in (torch.autograd.grad, torch.autograd.backward):  # the guard of masters knows what is in graphs
            args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: leaf.master)
            return func(*args, **kwargs)
        with without_torch_function():
            name = name_of(func)
            if name in OF_THE_DTYPE:
                return func(args[0].master)
            # a dispatch mode hands on what backward does
            backward_does_it = isinstance(func, OpOverload) and in_backward()
            if name in _OF_THE_LEAF or is_metadata(name) or backward_does_it:
                return func(*args, **kwargs)
            is_casting = func in _CASTING and "out" not in kwargs  # which autocast leaves alone
            leaves = list(instances_in((args, kwargs), cls))
            found = {id(leaf): leaf if is_casting and leaf._is_cast() else leaf._as_is() for leaf in leaves}
            if all(kind is cls for kind in types) and all(found[id(leaf)] is leaf for leaf in leaves):
                return func(*args, **kwargs)
            plain = {id(leaf): leaf.view_as(leaf) if found[id(leaf)] is leaf else found[id(leaf)] for leaf in leaves}
            args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: plain.get(id(leaf), leaf))
        return func(*args, **kwargs)

    def _is_cast(self) -> bool:
        """Tell whether autocast casts it now, and its gradients may be lower ones, as no others are added to them.

        What runs again in backward for what it saves does as before; a reentrant checkpoint builds a graph there.
        """
        guard, weight = guarded.get(id(self.master), (None, None))
        kind = self.device.type
        if guard is None or weight is None or not torch.is_autocast_enabled(kind):
            return False
        if weight.lowered and torch.get_autocast_dtype(kind) is not weight.compute_dtype:
            return False
        again = in_backward()
        if again and type(running_node()).__name__ != "CheckpointFunctionBackward":
            return True
        if self.dtype is not weight.compute_dtype:
            return False  # it was served, and may have been changed since
        builds_graph = self.requires_grad and torch.is_grad_enabled()
        if builds_graph:
            graph = graph_task() if again else guard.graph_number
            earlier, weight.cast_in[again] = weight.cast_in.get(again), graph
            if graph == earlier:
                return False
        if builds_graph or not weight.master.requires_grad:
            guard.note_cast(weight)
        return True
