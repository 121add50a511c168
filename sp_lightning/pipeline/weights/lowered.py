"""Leaves of weights that autocast lowers: its operations compute with them, all others with the weight as it is.

The leaf of a lowered weight lies in the lower dtype, and says that it has its master's. What autocast casts passes,
views of it are marked in the same way, and everything else gets the weight in its own dtype, which is how the weight is
sent from then on. So lowering.py may decide by the class of a layer, whatever a program does with the layer's weights.

A leaf that is to be watched is of the same class, in the weight's own dtype: what happens to it is only noted.

Code that torch compiles is not served: it computes with the leaf as with any Parameter. So that it can, this is one of
the files that `torch.compile` may look into.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge

from sp_lightning.pipeline.torch_private import (
    graph_task,
    in_backward,
    running_node,
    storage_key,
    without_torch_function,
)
from sp_lightning.pipeline.weights.guard import METADATA, HostParameter
from sp_lightning.pipeline.weights.leaf import CAN_COMPILE_SUBCLASSES, EagerLeaf, TwinParameter, refuse_to_set_data
from sp_lightning.pipeline.weights.operands import instances_in, replace_instances
from sp_lightning.pipeline.weights.weight import Weight

# What autocast casts on every device, and once, whatever the other operands are
_CAST = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "multi_head_attention_forward",
}  # fmt: skip
_VIEWS = {
    "__getitem__", "t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "view",
    "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow", "select", "chunk",
    "split", "tensor_split", "unbind", "contiguous",
}  # fmt: skip
_CONVERSIONS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
_OF_THE_LEAF = METADATA - {"dtype", "element_size", "itemsize", "nbytes"} | {"grad", "_version", "untyped_storage"}
_CASTS = "superpipeline casts"  # a key in the metadata of a node


class Owner(Protocol):
    """What a leaf knows of the object that serves its weight."""

    @property
    def graph_number(self) -> int:
        """The number of the graph that is being built."""

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device, in its own dtype from now on."""

    def note_use(self, weights: Iterable[Weight]) -> None:
        """Note that an operation outside of their units has used weights, as they were served."""


def watch_leaf(weight: Weight, owner: Owner, dtype: torch.dtype) -> Lowering:
    """Give the leaf of a weight the class that serves it, or that only watches if the weight is not lowered."""
    leaf = weight.twin.parameter
    leaf.__dict__["lowering"] = found = Lowering(weight, owner, dtype)
    leaf.__class__ = LoweredParameter
    return found


def hide_dtype(weight: Weight) -> None:
    """Give the leaf of a lowered weight of a model that is compiled the class that dynamo can follow."""
    if CAN_COMPILE_SUBCLASSES:
        weight.twin.parameter.__class__ = LoweredInGraphs


class Lowering:
    """How a leaf, and views of it, are used under autocast. The leaf may outlive the weight and its owner.

    Attributes:
        is_cast: Whether autocast has cast it, in a graph if it is trained.
        as_is: Whether it was used in another way, or cast several times in one graph, whose gradients add up in the
            weight's own dtype.
        is_lower: Whether the leaf is in the lower dtype, and not only watched.
    """

    def __init__(self, weight: Weight, owner: Owner, dtype: torch.dtype) -> None:
        leaf = weight.twin.parameter
        self.weight = weakref.ref(weight)
        self.owner = weakref.ref(owner)
        self.original = torch.empty(0, dtype=weight.dtype, device=leaf.device)
        self.is_cast = self.as_is = False
        self._dtype = dtype
        self.is_lower = leaf.dtype is not weight.dtype
        self._start = leaf.storage_offset()
        self._graph = -1
        self._casts: list[range] = []

    def must_be_served(self, operand: Tensor, may_be_cast: bool) -> bool:
        """Note an operation on the leaf, or on a view of it; tell whether that has to get the weight as it is."""
        device_type = operand.device.type
        is_on = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is self._dtype
        if is_on and may_be_cast and self._is_first_cast(operand):
            self._note_cast(operand)
            return False
        self.as_is = True
        return self.is_lower

    def _is_first_cast(self, operand: Tensor) -> bool:
        """Note a cast; tell whether gradients may leave it in the lower dtype, as no others are added to them."""
        weight, casts = self.weight(), self._casts_in_graph()
        if self.is_lower and weight is not None and not weight.lowered:
            return casts is None  # it was served, and may have been changed since; what runs again computes as before
        if casts is None or not (operand.requires_grad and torch.is_grad_enabled()):
            return True
        return note_elements(operand, casts)

    def _note_cast(self, operand: Tensor) -> None:
        weight = self.weight()
        is_frozen = weight is not None and not weight.master.requires_grad
        self.is_cast = self.is_cast or is_frozen or (operand.requires_grad and torch.is_grad_enabled())

    def converted(self, operand: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a conversion of an operand makes of it, as of the weight as it is; None if it takes the values.

        Nothing, if it has the dtype that is wanted; or the user casts it as autocast would.
        """
        if "memory_format" in kwargs:
            return None
        others = replace_instances((args[1:], kwargs), _Served, lambda each: each.lowering.original)
        as_in_plain = func(self.original, *others[0], **others[1])
        if as_in_plain is self.original:
            return operand
        if not isinstance(as_in_plain, Tensor):
            return as_in_plain  # `weight.type()` is a name
        is_cast = as_in_plain.dtype is self._dtype and as_in_plain.device == operand.device
        if not (is_cast and self._is_first_cast(operand)):
            return None
        self._note_cast(operand)
        result: Tensor = func(operand, *others[0], **others[1])
        return operand.view_as(operand) if result is operand else result

    def _casts_in_graph(self) -> list[range] | None:
        """Return what was cast in the graph that is being built; None where a forward runs again for what it saves."""
        if in_backward():
            node = running_node()
            if node is None or type(node).__name__ != "CheckpointFunctionBackward":
                return None
            metadata: Any = node.metadata  # a reentrant checkpoint builds a graph each time that its node runs
            found: list[range] = metadata.setdefault((_CASTS, graph_task(), id(self)), [])
            return found
        owner = self.owner()
        if owner is not None and self._graph != owner.graph_number:
            self._graph, self._casts = owner.graph_number, []
        return self._casts

    def serve(self, operand: Tensor) -> Tensor:
        """Return the weight, or the same view of it, in its own dtype."""
        owner, weight = self.owner(), self.weight()
        assert owner is not None
        assert weight is not None  # it lives as long as its owner
        served = owner.serve(weight)
        if isinstance(operand, LoweredParameter):
            return served
        values = served if operand.grad_fn is not None else served.detach()
        offset = operand.storage_offset() - self._start + served.storage_offset()
        return values.as_strided(operand.size(), operand.stride(), offset)


class _Served:
    """What leaves of lowered weights and views of them have in common."""

    lowering: Lowering

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation with the lowered values if that is right, else with the weight as it is."""
        if HostParameter in types:
            return NotImplemented  # the master is replaced first
        if torch.compiler.is_compiling():
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        return _run(func, args, kwargs or {}, among_others=not _SERVED.issuperset(types))


class LoweredParameter(_Served, EagerLeaf):
    """The leaf of a lowered weight, or of one that is watched."""

    @property
    def data(self) -> Tensor:
        """The values in the weight's own dtype: they may be written to, which the weight counts."""
        with without_torch_function():
            if self.lowering.is_lower:
                return self.lowering.serve(self).data
            self.lowering.as_is = True
            return cast("Tensor", TwinParameter.data.__get__(self))

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_to_set_data(self, values)


class LoweredView(_Served, Tensor):
    """A view of a lowered weight."""


class LoweredInGraphs(TwinParameter):
    """The leaf of a lowered weight in a model that is compiled: it hides its dtype, but from torch's own modules."""

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The master's dtype, for models that ask before the cast: `x.to(self.weight.dtype)`. Only fp32 is lowered."""
        asks = "" if torch.compiler.is_compiling() else sys._getframe(1).f_globals.get("__name__", "")
        is_torch = asks.startswith(("torch._", "torch.utils.checkpoint", "torch.fx"))
        return super().dtype if is_torch else torch.float32


_SERVED = frozenset({LoweredParameter, LoweredView})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], among_others: bool) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
    if func is torch.autograd.grad:
        return _differentiate(*args, **kwargs)
    if func is torch.autograd.backward:
        return func(*args, **{**kwargs, "inputs": _edges_of(kwargs["inputs"])})
    with without_torch_function():
        operands = [each for each in instances_in((args, kwargs), _Served) if _has_owner(each)]
        if not operands or name in _OF_THE_LEAF or name.startswith("is_"):
            return func(*args, **kwargs)
        if isinstance(func, OpOverload) and in_backward():  # a dispatch mode hands on what backward does
            return func(*args, **kwargs)
        if name == "dtype":
            return operands[0].lowering.original.dtype
        is_view = name in _VIEWS and not any(instances_in((args, kwargs), torch.dtype))  # `view` may change the dtype
        if is_view and _mark(result := func(*args, **kwargs), operands[0]):
            return result
        served, converts, first = [], name in _CONVERSIONS, operands[0]
        if converts and first is args[0] and (made := first.lowering.converted(first, func, args, kwargs)) is not None:
            return made
        if converts and first is not args[0]:  # `x.to(weight)` asks for its dtype and device
            replaced = {id(operand): operand.lowering.original for operand in operands}
        else:
            # functions of others may have such a name, too; autocast leaves `out=` alone
            of_others = isinstance(func, OpOverloadPacket | torch.jit.ScriptFunction) or "out" in kwargs
            served = [each for each in operands if each.lowering.must_be_served(each, name in _CAST and not of_others)]
            if not served and not among_others:
                return func(*args, **kwargs)
            replaced = {id(operand): operand.view_as(operand) for operand in operands}
            replaced |= {id(operand): operand.lowering.serve(operand) for operand in served}
        args, kwargs = replace_instances((args, kwargs), _Served, lambda each: replaced.get(id(each), each))
    result = func(*args, **kwargs)
    for operand in served:
        owner, weight = operand.lowering.owner(), operand.lowering.weight()
        if owner is not None and weight is not None:
            owner.note_use([weight])
    return result


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` with edges of the graph, which have no class; gradients get the dtype they should."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    gradients = torch.autograd.grad(outputs, _edges_of(inputs), *args, **kwargs)
    pairs = zip(gradients, inputs, strict=True)
    return tuple(gradient if gradient is None else gradient.to(each.dtype) for gradient, each in pairs)


def _edges_of(inputs: Any) -> Any:
    with without_torch_function():
        return replace_instances(inputs, _Served, get_gradient_edge)


def _has_owner(operand: Any) -> bool:
    lowering = operand.__dict__.get("lowering")  # a copy of a leaf has none
    return lowering is not None and lowering.owner() is not None


def _mark(views: Any, source: Any) -> bool:
    """Mark views of a lowered weight; return False, changing nothing, if they are something else."""
    tensors = views if isinstance(views, tuple | list) else [views]
    key = storage_key(source)
    if any(storage_key(tensor) != key for tensor in tensors):
        return False
    for tensor in tensors:
        if tensor is not source:
            tensor.__dict__["lowering"] = source.lowering
            tensor.__class__ = LoweredView
    return True


def note_elements(operand: Tensor, earlier: list[range]) -> bool:
    """Tell whether no element of an operand is cast twice, here or in the earlier ranges of elements; add to these."""
    start = operand.storage_offset()
    end = start + 1
    for stride, size in sorted(zip(operand.stride(), operand.shape, strict=True)):
        if size > 1 and stride < end - start:
            return False  # it repeats elements
        end += (size - 1) * stride
    again = any(start < other.stop and other.start < end for other in earlier)
    earlier.append(range(start, end))
    return not again
