"""Leaves of weights that autocast lowers: what it casts computes with them, all else with the weight as it is.

The leaf of a lowered weight lies in the lower dtype, and says that it has its master's. It passes as the operand of
what autocast casts, once in each graph. Whatever else a program does with it gets the weight in its own dtype at once,
which is how the weight is sent from then on. So lowering.py may decide by the class of a layer.

A leaf that is to be watched is of the same class, in the weight's own dtype: what happens to it is only noted.

Code that torch compiles is not served: it computes with the leaf as with any Parameter. So that it can, this is one of
the files that `torch.compile` may look into.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from sp_lightning.pipeline.torch_private import graph_task, in_backward, running_node, without_torch_function
from sp_lightning.pipeline.weights.leaf import EagerLeaf, refuse_to_set_data
from sp_lightning.pipeline.weights.operands import instances_in, is_metadata, name_of, replace_instances

Weight: TypeAlias = Any  # weights make their leaves, and import this file

# What autocast casts on every device, and once, whatever the other operands are
_NAMES = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "multi_head_attention_forward",
)  # fmt: skip
_CASTING = {getattr(place, name) for place in (torch, Tensor, F) for name in _NAMES if hasattr(place, name)}
_OF_THE_LEAF = {"grad", "_version", "untyped_storage"}
_OF_THE_DTYPE = {"element_size", "itemsize", "nbytes"}


class Server(Protocol):
    """What a leaf knows of the object that serves its weight."""

    @property
    def graph_number(self) -> int:
        """The number of the graph that is being built."""

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device, in its own dtype from now on."""


class Lowering:
    """How a leaf is used under autocast. The leaf may outlive the weight and its server.

    Attributes:
        is_cast: Whether autocast has cast it, in a graph if it is trained.
        as_is: Whether it was used in another way, or cast several times in one graph, whose gradients add up in the
            weight's own dtype.
    """

    def __init__(self, weight: Weight, server: Server, dtype: torch.dtype) -> None:
        self.weight = weakref.ref(weight)
        self.server = weakref.ref(server)
        self.is_cast = self.as_is = False
        self._dtype = dtype
        self._cast_in: dict[str, int] = {}  # the graph of the last cast, in a forward and in a backward

    def passes(self, leaf: LoweredParameter, is_casting: bool) -> bool:
        """Note an operation on the leaf; tell whether that may compute with the lower values."""
        kind, weight = leaf.device.type, self.weight()
        is_on = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self._dtype
        builds_graph = leaf.requires_grad and torch.is_grad_enabled()
        if not (is_on and is_casting and self._is_first_cast(leaf, builds_graph)):
            self.as_is = True
            return False
        self.is_cast = self.is_cast or builds_graph or (weight is not None and not weight.master.requires_grad)
        return True

    def _is_first_cast(self, leaf: LoweredParameter, builds_graph: bool) -> bool:
        """Note a cast; tell whether gradients may leave it in the lower dtype, as no others are added to them.

        What runs again in backward for what it saves does as before; a reentrant checkpoint builds a graph there.
        """
        weight, server = self.weight(), self.server()
        where, graph = "forward", -1 if server is None else server.graph_number
        if in_backward():
            if type(running_node()).__name__ != "CheckpointFunctionBackward":
                return True
            where, graph = "backward", graph_task()
        if weight is not None and not weight.lowered and leaf.dtype is not weight.dtype:
            return False  # it was served, and may have been changed since
        if not builds_graph:
            return True
        earlier, self._cast_in[where] = self._cast_in.get(where), graph
        return graph != earlier


class LoweredParameter(EagerLeaf):
    """The leaf of a lowered weight, or of one that is watched."""

    __slots__ = ("lowering",)

    lowering: Lowering

    @property
    def data(self) -> Tensor:
        """The values in the weight's own dtype: they may be written to, which the weight counts."""
        with without_torch_function():
            return self.as_is().detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_to_set_data(self, values)

    def as_is(self) -> nn.Parameter:
        """Return the weight in its own dtype, which is this leaf if it is only watched."""
        self.lowering.as_is = True
        server, weight = self.lowering.server(), self.lowering.weight()
        if server is None or weight is None or self.dtype is weight.dtype:
            return self
        return server.serve(weight)

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
        if func is torch.autograd.grad:
            return _differentiate(*args, **kwargs)
        if func is torch.autograd.backward:
            return func(*args, **{**kwargs, "inputs": _edges_of(kwargs["inputs"])})
        with without_torch_function():
            name, leaves = name_of(func), [leaf for leaf in instances_in((args, kwargs), cls) if _is_served(leaf)]
            # a dispatch mode hands on what backward does
            backward_does_it = isinstance(func, OpOverload) and in_backward()
            is_asked = name in _OF_THE_LEAF or (is_metadata(name) and name not in _OF_THE_DTYPE)
            if not leaves or is_asked or backward_does_it:
                return torch.float32 if leaves and name == "dtype" else func(*args, **kwargs)
            is_casting = func in _CASTING and "out" not in kwargs  # which autocast leaves alone
            found = {id(leaf): leaf if leaf.lowering.passes(leaf, is_casting) else leaf.as_is() for leaf in leaves}
            is_served = any(found[id(leaf)] is not leaf for leaf in leaves)
            if not is_served and all(kind is cls for kind in types):
                return func(*args, **kwargs)
            plain = {id(leaf): leaf.view_as(leaf) if found[id(leaf)] is leaf else found[id(leaf)] for leaf in leaves}
            args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: plain.get(id(leaf), leaf))
        return func(*args, **kwargs)


def _is_served(leaf: LoweredParameter) -> bool:
    return hasattr(leaf, "lowering") and leaf.lowering.server() is not None  # a copy of a leaf has none


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` with edges of the graph, which have no class; gradients get the dtype they should."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    gradients = torch.autograd.grad(outputs, _edges_of(inputs), *args, **kwargs)
    pairs = zip(gradients, inputs, strict=True)
    return tuple(gradient if gradient is None else gradient.to(each.dtype) for gradient, each in pairs)


def _edges_of(inputs: Any) -> Any:
    with without_torch_function():
        return replace_instances(inputs, LoweredParameter, get_gradient_edge)
