"""The leaf of a twin: a Parameter that stands in for the master while its unit computes, and answers torch's requests.

[Note: one weight, two Parameters]
The one in the module tree is the weight; code that uses the other one gets it. A program may hold a master since
`__init__` and use it within its module's call: the guard gives it the leaf (guard.py). And a program may keep a leaf
beyond the call: once no module has it any more, its class is `DepartedLeaf` (weight.py), which gives the master. So a
kept leaf never reads what others have put in its place.

A forward may contain `self.weight.data.clamp_()`, which has to reach the master like any other change. So the leaf's
`.data` shares its version. Attributes that users set on a Parameter, its hooks, and its gradient are those of the
master.

[Note: functions that are made to ask]
Some functions of torch's take weights without asking their class (`__torch_function__`). Here they are made to ask.
Factories such as `torch.tensor(weight)` take any object, `nn.Parameter(weight)` takes those of torch's own classes, and
custom autograd Functions take all arguments as they are; before torch 2.14, so does `backward(inputs=...)`. They are
changed once in a process, when the engine is first imported, and do what they did for everything but our own classes.

`torch.compile` has to look into this file, as it meets these classes and functions in user code. The engine's work
around graphs is in other files, or it would be compiled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.operations import Args, Kwargs, Operation
from sp_lightning.pipeline.torch_private import apply_of, register_builtin, remember_device_constructors


class CopiedPlainly(nn.Parameter):
    """A Parameter whose copies are ordinary ones, as its pickles are anyway."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        return nn.Parameter(self.data.clone(), self.requires_grad)


class WithMaster(Protocol):
    """The part of a weight that its leaf has to know."""

    name: str
    master: nn.Parameter


class TwinParameter(CopiedPlainly):
    """A Parameter that counts writes to its `.data`."""

    __slots__ = ("weight",)

    weight: WithMaster

    @property
    def data(self) -> Tensor:
        """The values, without history, like the `.data` of any Parameter."""
        return self.detach()  # shares the leaf's version, as dynamo has it, too

    @data.setter
    def data(self, values: Tensor) -> None:
        self._refuse_other_memory(values)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Give it the memory that it has, as `parametrize` does; a leaf gets no other."""
        self._refuse_other_memory(source if not (args or kwargs) else None)
        return self

    def _refuse_other_memory(self, values: object) -> None:
        """Raise unless these are the values that it has: `module.float()` may have nothing to convert."""
        is_same = values is self or (
            isinstance(values, Tensor) and values.data_ptr() == self.data_ptr() and values.dtype is self.dtype
        )
        if not is_same:
            raise RuntimeError(
                f"A forward gives weight {self.weight.name!r} other memory (`weight.data = ...`, "
                "`weight.set_(...)`, or a conversion of its module) while it is on the device. Write "
                "into it (`weight.data.copy_(...)`), or convert it between steps."
            )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Register a hook on the master, which keeps it when another leaf stands for the weight."""
        return self.weight.master.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook on the master, which has the accumulated gradient."""
        master = self.weight.master
        return master.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the attributes that users have set, and not the weight: all Parameters pickle as ordinary ones."""
        return vars(self)


class EagerLeaf(TwinParameter):
    """The leaf of a weight of a model that is not compiled: the attributes that users set are those of the master."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: the engine takes the one that autograd gives the leaf at once."""
        return self.weight.master.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.weight.master.grad = gradient


_FACTORIES = (
    "tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_compressed_tensor", "sparse_csr_tensor",
    "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
)  # fmt: skip
_METHODS = ("new_tensor", "new", "set_", "as_subclass")

Kinds = Sequence[type[nn.Parameter]]


class SeesFunctions(Protocol):
    """A listener that notes each custom autograd Function as it is applied."""

    def note_function(self, output: Any) -> None:
        """Note the output of a Function."""


class RunningCalls(threading.local):
    """The calls of units that this thread is in, of all models, innermost last."""

    def __init__(self) -> None:
        self.stack: list[SeesFunctions] = []


running_calls = RunningCalls()


def see_all_uses(kinds: Kinds, leaves: Kinds) -> None:
    """Have these classes see uses that torch would not tell them of, and calls of units see custom Functions."""
    remember_device_constructors()
    for name in _FACTORIES:
        _have_classes_asked(torch, name, kinds)
    for name in _METHODS:
        _have_classes_asked(Tensor, name, kinds)
    if torch.__version__ < "2.14":
        _have_inputs_asked(kinds)
    _make_parameters_of(kinds, leaves)
    _see_functions(kinds)


def _call_by_class(kinds: Kinds, function: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Call a function, by the `__torch_function__` of these classes if it is given an instance of one."""
    given = [value for value in (*args, *kwargs.values()) if type(value) in kinds]
    if given and torch.overrides.has_torch_function(given):
        return torch.overrides.handle_torch_function(function, given, *args, **kwargs)
    return function(*args, **kwargs)


def _have_classes_asked(owner: Any, name: str, kinds: Kinds) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        return _call_by_class(kinds, function, args, kwargs)

    setattr(owner, name, asking)
    register_builtin(asking, function)


def _have_inputs_asked(kinds: Kinds) -> None:
    """Have `torch.autograd.backward` ask the classes of its inputs. `Tensor.backward` calls it, too."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def asking(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs")
        if inputs is not None:
            kwargs["inputs"] = inputs = (inputs,) if isinstance(inputs, (Tensor, GradientEdge)) else tuple(inputs)
            given = [value for value in inputs if type(value) in kinds]
            if given and torch.overrides.has_torch_function(given):
                return torch.overrides.handle_torch_function(asking, given, *args, **kwargs)
        return backward(*args, **kwargs)

    torch.autograd.backward = asking


def _make_parameters_of(kinds: Kinds, leaves: Kinds) -> None:
    """Have `nn.Parameter(data)` take instances of these classes for Parameters.

    It takes instances of torch's own classes only. For those of other classes, `detach` has to return a Parameter, too.
    Only its `__new__` is replaced. A Parameter that is made of a leaf may outlive the values in the leaf's place. So it
    gets memory of its own.
    """
    make = nn.Parameter.__new__

    @functools.wraps(make)
    def make_of(new: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in leaves:
            data = data.detach().clone()
        elif type(data) in kinds:
            data = data.detach()
        return make(new, data, requires_grad)

    nn.Parameter.__new__ = staticmethod(make_of)  # type: ignore[method-assign, assignment]


def _see_functions(kinds: Kinds) -> None:
    bind = apply_of(Function)

    @functools.wraps(Function.apply)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        output = _call_by_class(kinds, bind(cls), args, kwargs)
        for call in running_calls.stack:
            call.note_function(output)
        return output

    Function.apply = classmethod(apply)
