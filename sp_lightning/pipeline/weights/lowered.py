"""Lowered weights on the device: autocast's operations compute with them, all others with the weight as it is.

How autocast treats a weight is seen in a first forward (lowering.py), and may change: a module begins to read the norm
of a weight after a warm-up, or in evaluation only, or calls a layer twice. So the leaves of lowered weights get a class
with `__torch_function__`, as masters do (guard.py). It lets through what autocast casts, marks views of weights in the
same way, and has everything else served with the weight in its own dtype.

Code that torch compiles is not served: it computes with the leaf as with any Parameter. So that it can, this is one of
the files that `torch.compile` may look into.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge

from sp_lightning.pipeline.torch_private import in_backward, storage_key, without_torch_function
from sp_lightning.pipeline.weights.guard import METADATA, HostParameter, Owner
from sp_lightning.pipeline.weights.leaf import CAN_COMPILE_SUBCLASSES, StandsIn, TwinParameter
from sp_lightning.pipeline.weights.operands import instances_in, replace_instances
from sp_lightning.pipeline.weights.weight import Twin, Weight

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
ALL_ELEMENTS = range(sys.maxsize)  # of any weight
_DATA: Any = Tensor.data
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
_OF_THE_LEAF = METADATA - {"element_size", "itemsize", "nbytes"} | {"grad", "_version", "untyped_storage"}


def guard_lowered(weight: Weight, owner: Owner, compiled: bool) -> None:
    """Give the leaf of a lowered weight a class that hides its dtype, and has it served where it must not be lowered.

    Args:
        weight: The weight.
        owner: Serves it.
        compiled: Whether the model is compiled, and so the class must not do more than dynamo can follow.
    """
    leaf = weight.twin.parameter
    if not compiled:
        leaf.__dict__["lowering"] = _Lowering(weight, owner)
        leaf.__class__ = LoweredParameter
    elif CAN_COMPILE_SUBCLASSES:
        leaf.__class__ = LoweredInGraphs


def begin_call(twin: Twin) -> None:
    """Note that a call of a weight's unit begins."""
    if (lowering := twin.parameter.__dict__.get("lowering")) is not None:
        lowering.begin_call()


class _Lowering:
    """What is known of a lowered leaf, and of views of it. The leaf may outlive the weight and its owner."""

    def __init__(self, weight: Weight, owner: Owner) -> None:
        leaf = weight.twin.parameter
        self.weight = weakref.ref(weight)
        self.owner = weakref.ref(owner)
        self.original = torch.empty(0, dtype=weight.master.dtype, device=leaf.device)
        self.dtype = weight.compute_dtype
        self._device_type = leaf.device.type
        self._elements = range(leaf.storage_offset(), leaf.storage_offset() + leaf.numel())
        self._casts: list[range] = []
        self._is_cached = False

    def begin_call(self) -> None:
        """Begin a call of its unit: forget what was cast in calls before."""
        self._casts.clear()
        self._is_cached = False

    def admits(self, operand: Tensor, casts_views: bool) -> bool:
        """Note that autocast is about to cast an operand; tell whether that is what was done to the weight.

        Args:
            operand: The leaf or a view of it.
            casts_views: Whether the operation makes views, which are cast then; autocast's cache holds none.
        """
        is_on = torch.is_autocast_enabled(self._device_type)
        if not is_on or torch.get_autocast_dtype(self._device_type) is not self.dtype:
            return False
        if torch.is_autocast_cache_enabled() and isinstance(operand, LoweredParameter) and not casts_views:
            self._is_cached = self._is_cached or self.note_cast(operand)
            return self._is_cached
        return self.note_cast(operand)

    def note_cast(self, operand: Tensor) -> bool:
        """Note a cast; tell whether gradients may leave it in the lower dtype, as no others are added to them."""
        owner, weight = self._parts()
        if not weight.lowered:  # it was served, and may have been changed since; what runs again computes as before
            return in_backward() and owner.casts_in_new_graph(weight) is None
        if not (operand.requires_grad and torch.is_grad_enabled()):
            return True
        casts = self._casts
        if not weight.twin.group.users:  # a checkpoint within the unit runs again in backward
            in_new_graph = owner.casts_in_new_graph(weight)
            if in_new_graph is None:
                return True
            casts = in_new_graph
        if isinstance(operand, LoweredParameter) and not casts:
            casts.append(self._elements)
            return True
        return note_elements(operand, casts)

    def serve(self, operand: Tensor) -> Tensor:
        """Return the weight, or the same view of it, in its own dtype."""
        owner, weight = self._parts()
        served = owner.serve(weight)
        if isinstance(operand, LoweredParameter):
            return served
        values = served if operand.grad_fn is not None else served.detach()
        offset = operand.storage_offset() - self._elements.start + served.storage_offset()
        return values.as_strided(operand.size(), operand.stride(), offset)

    def note_use(self) -> None:
        """Note that an operation has used the weight as it is."""
        owner, weight = self._parts()
        owner.note_use([weight])

    def _parts(self) -> tuple[Owner, Weight]:
        owner, weight = self.owner(), self.weight()
        assert owner is not None
        assert weight is not None  # it lives as long as its owner
        return owner, weight


def note_elements(operand: Tensor, earlier: list[range]) -> bool:
    """Tell whether no element of an operand is cast twice, here or in the earlier ranges of elements; add to these."""
    end = operand.storage_offset() + 1
    for stride, size in sorted(zip(operand.stride(), operand.shape, strict=True)):
        if size > 1 and stride < end - operand.storage_offset():
            return False  # it repeats elements
        end += (size - 1) * stride
    elements = range(operand.storage_offset(), end)
    again = any(elements.start < other.stop and other.start < elements.stop for other in earlier)
    earlier.append(elements)
    return not again


_SEE_THE_DTYPE = ("torch._", "torch.utils.checkpoint", "torch.fx")  # beginnings of names of modules


class _HidesDtype:
    """Models ask for the dtype before the cast: `x.to(self.weight.dtype)`, and then dropout. Only fp32 is lowered.

    A checkpoint gets the true dtype, because it compares what was saved with a copy that is no Parameter, and so do
    those parts of torch that follow code.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The master's dtype, or for parts of torch the true one."""
        asks = "" if torch.compiler.is_compiling() else sys._getframe(1).f_globals.get("__name__", "")
        return cast("torch.dtype", super().dtype) if asks.startswith(_SEE_THE_DTYPE) else torch.float32  # type: ignore[misc]


class LoweredInGraphs(_HidesDtype, TwinParameter):  # type: ignore[override]
    """The leaf of a lowered weight in a model that is compiled."""


class Served(_HidesDtype):
    """What leaves of lowered weights and views of them have in common."""

    lowering: _Lowering

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


class LoweredParameter(StandsIn, Served, nn.Parameter):  # type: ignore[override]
    """The leaf of a lowered weight."""


class LoweredView(Served, Tensor):  # type: ignore[override]
    """A view of a lowered weight."""


_SERVED = frozenset({LoweredParameter, LoweredView})


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], among_others: bool) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__  # type: ignore[attr-defined]
    if func in (torch.autograd.grad, torch.autograd.backward):
        with without_torch_function():
            args, kwargs = replace_instances((args, kwargs), LoweredParameter, get_gradient_edge)
        return func(*args, **kwargs)
    with without_torch_function():
        operands = list(instances_in((args, kwargs), Served))
        if _asks_the_leaf(func, name) or not all(map(_has_owner, operands)):
            return func(*args, **kwargs)
        if func == _SET_DATA and args[0] is args[1]:
            return None  # as `module.float()` does, when there is nothing to convert
        if func == _GET_DATA:  # it may be written to, which the weight counts
            return operands[0].lowering.serve(operands[0]).data
        is_view = name in _VIEWS and not any(instances_in((args, kwargs), torch.dtype))  # `view` may change the dtype
        if is_view and _mark(result := func(*args, **kwargs), operands[0]):
            return result
        converts, is_itself = name in _CONVERSIONS, operands[0] is args[0]
        if converts and is_itself and (result := _convert(func, args, kwargs)) is not None:
            return result
        if converts and not is_itself:  # `x.to(weight)` asks for its dtype and device
            served = []
            substitutes = {id(operand): operand.lowering.original for operand in operands}
        else:
            served = _not_cast(operands, func, name, args, kwargs)
            if not served and not among_others:
                return func(*args, **kwargs)
            substitutes = {id(operand): operand.view_as(operand) for operand in operands}
            substitutes |= {id(operand): operand.lowering.serve(operand) for operand in served}
        new_args, new_kwargs = replace_instances((args, kwargs), Served, lambda operand: substitutes[id(operand)])
    result = func(*new_args, **new_kwargs)
    for operand in served:
        operand.lowering.note_use()
    return result


def _asks_the_leaf(func: Callable[..., Any], name: str) -> bool:
    if isinstance(func, OpOverload) and in_backward():  # a dispatch mode hands on what backward does with saved weights
        return True
    return name in _OF_THE_LEAF or name.startswith("is_")


def _has_owner(operand: Served) -> bool:
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


def _convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert a weight from the dtype that it would have in plain training; return None if that takes its values."""
    operand, *others = args
    lowering = operand.lowering
    others, kwargs = replace_instances((others, kwargs), Served, lambda other: other.lowering.original)
    if any(instances_in((others, kwargs), torch.memory_format)):
        return None
    as_in_plain = func(lowering.original, *others, **kwargs)
    if as_in_plain is lowering.original:
        return operand
    if not isinstance(as_in_plain, Tensor):
        return as_in_plain  # `weight.type()` is a name
    is_cast = as_in_plain.dtype is lowering.dtype and as_in_plain.device == operand.device
    if not (is_cast and lowering.note_cast(operand)):
        return None
    result = func(operand, *others, **kwargs)
    return operand.view_as(operand) if result is operand else result


def _not_cast(
    operands: list[Any], func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the operands that autocast does not cast, or not as their weights were: they need the weight as it is."""
    is_cast, casts_views = _is_cast(func, name, args, kwargs)
    return [each for each in operands if not (is_cast and each.lowering.admits(each, casts_views))]


def _is_cast(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Tell whether autocast casts the operands, and if so, whether it casts views of them."""
    if isinstance(func, OpOverloadPacket | torch.jit.ScriptFunction) or "out" in kwargs:
        return False, False  # functions of others may have such a name, too; autocast leaves `out=` alone
    is_einsum = name == "einsum" and _multiplies_matrices(*args)
    return name in _CAST or is_einsum, is_einsum


def _multiplies_matrices(equation: Any, *operands: Any) -> bool:
    """Tell whether `einsum` gives its operands to `bmm`, and does not multiply or sum their elements itself."""
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return False
    inputs, output = equation.replace(" ", "").split("->")
    summed = []
    for letters, operand in zip(inputs.split(","), operands, strict=False):
        first, dots, last = letters.partition("...")
        if len(set(first + last)) < len(first + last) or (dots and dots not in output):
            return False
        sizes = (*operand.shape[: len(first)], *operand.shape[operand.dim() - len(last) :])
        known = zip(first + last, sizes, strict=False)
        summed.append({letter: size for letter, size in known if letter not in output})
    return summed[0] == summed[-1] and any(size > 1 for size in summed[0].values())
