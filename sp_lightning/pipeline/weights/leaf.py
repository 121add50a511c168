"""The leaf of a twin: a Parameter that stands in for the master while its unit computes.

A forward may contain `self.weight.data.clamp_()`, which has to reach the master like any other change. So the leaf's
`.data` shares its version. Attributes that users set on a Parameter, and its gradient, are those of the master.

[Note: weights that autocast lowers]
They are sent in its dtype, at half the bytes. Which ones these are shows in the first step, in which leaves tell how
they are used. A leaf passes as the operand of what autocast casts, in each graph for as long as autocast's cache would
have one cast of it. Whatever else a program does with a lowered weight gets it in its own dtype at once, which is how
it is sent from then on. So numbers are those of plain autocast in every step. Code that torch compiles tells nothing,
so no weight of a model with such code is lowered.

`torch.compile` has to look into this file. What the engine does around graphs is elsewhere, or it would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from sp_lightning.pipeline.operands import OF_THE_DTYPE, instances_in, is_metadata, name_of, replace_instances
from sp_lightning.pipeline.torch_private import explain_graph_break, in_backward, running_node, without_torch_function

if TYPE_CHECKING:
    from sp_lightning.pipeline.calls.outside import Guard
    from sp_lightning.pipeline.weights.weight import Weight


_GRADIENT: Any = Tensor.grad


class TwinParameter(nn.Parameter):
    """A Parameter that counts what is written to its `.data`."""

    __slots__ = ("twin_of",)

    twin_of: str

    @property
    def data(self) -> Tensor:
        """The values, without history, as of any Parameter."""
        return self.detach()  # shares the leaf's version, as dynamo has it, too

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is self or (values.data_ptr() == self.data_ptr() and values.dtype is self.dtype):
            return  # `module.float()` had nothing to convert
        raise RuntimeError(
            f"A forward gives weight {self.twin_of!r} other memory (`weight.data = ...`, or a conversion of its module)"
            " while it is on the device. Write into it (`weight.data.copy_(...)`), or convert it between steps."
        )


class EagerLeaf(TwinParameter):
    """The leaf of a weight of a model that is not compiled: the attributes that users set are those of the master."""

    __slots__ = ("master",)

    master: nn.Parameter

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: what autograd gives the leaf is taken from it at once."""
        return self.master.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.master.grad = gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        return nn.Parameter(self.data.clone(), self.requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what users have set, and not the master: Parameters of all classes are pickled as ordinary ones."""
        return vars(self)


def take_gradient(leaf: nn.Parameter) -> Tensor | None:
    """Take from a leaf what autograd has given it."""
    gradient: Tensor | None = _GRADIENT.__get__(leaf)
    _GRADIENT.__set__(leaf, None)
    return gradient


# ----------------------------------------------------------------------------------- leaves that tell how they are used

WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Layers of torch's that read weights of the layers in them, without calling these."""

# What autocast casts on every device, and once, whatever the other operands are
_NAMES = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
)  # fmt: skip
_CASTING = {getattr(place, name) for place in (torch, Tensor, F) for name in _NAMES if hasattr(place, name)}
_OF_THE_LEAF = {"grad", "_version", "untyped_storage"}


def weights_to_leave(module: nn.Module) -> set[int]:
    """Return which Parameters of torch's layers are not lowered whatever their leaves would tell, by identity.

    In evaluation, some layers may be a single operation, which gets the weights as they are. With leaves that tell how
    they are used, torch would compute other numbers without it.
    """
    parts = [part for part in module.modules() if isinstance(part, WITH_FAST_PATH)]
    return {id(parameter) for part in parts for parameter in part.parameters()}


guarded: dict[int, tuple[Guard, Weight]] = {}
"""The guards of weights (outside.py) and the weights, by the identity of their masters: a leaf may outlive both."""


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
        found = guarded.get(id(self.master))
        if found is None:
            return self
        guard, weight = found
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
        """Tell whether autocast casts it now, and its gradients may be lower ones, as all come out of this cast.

        What runs again in backward for what it saves does as before; a reentrant checkpoint builds a graph there.
        """
        found = guarded.get(id(self.master))
        kind = self.device.type
        if found is None or not torch.is_autocast_enabled(kind):
            return False
        guard, weight = found
        if weight.lowered and torch.get_autocast_dtype(kind) is not weight.compute_dtype:
            return False
        again = in_backward()
        if again and type(running_node()).__name__ != "CheckpointFunctionBackward":
            return True
        if self.dtype is not weight.compute_dtype:
            return False  # it was served, and may have been changed since
        graph = self.requires_grad and torch.is_grad_enabled()
        return guard.note_cast(weight, torch.get_autocast_dtype(kind), builds_graph=graph)


explain_graph_break(
    vars(LoweredParameter)["__torch_function__"].__func__,
    "under autocast, superpipeline has to see how weights are used; compile the module that owns them",
)
