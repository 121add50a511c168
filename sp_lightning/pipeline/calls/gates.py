"""Gates: modules whose calls go through the engine, compiled or not, and the steps that such calls leave open.

[Note: a subclass, not forward hooks]
A module that is a gate has a subclass of its own class, made once for each class, as `fully_shard` does; the subclass
surrounds `__call__`. Forward hooks would do the same job worse: torch's fast paths (`nn.TransformerEncoderLayer` in
evaluation) look for hooks and compute other numbers when they see some, `always_call` hooks miss a KeyboardInterrupt,
`block.compile()` compiles hooks into the graph, and a deepcopy of the module takes them along. An attribute of the
instance would do it, too, but `block.compile()` and shallow copies pass it by.

The subclass is always on top: `module.__class__` is the class below it, and an assignment changes that class. Torch
keeps parametrizations in a class that it puts below, so they come and go as usual. Copies and pickles of a gate are
plain modules.

No other code is told of these subclasses: no metaclass that wants arguments or counts calls, no `__init_subclass__`
that keeps a registry or raises. They derive from the plain class alone. So Python lets an instance change between the
two, whatever its layout in memory (`Generic`, `ABC`, `__slots__` or `dict` among the bases).

[Note: what is in a graph]
`torch.compile` sees the call of a unit's module, including the user's hooks, and nothing of the engine, because the
gate is around it. Weights are inputs of the graph. So units that are alike share one graph, and no weight that moves
costs a compilation.

[Note: steps that stay open]
A call begins a step, which lasts until its backward or an optimizer's step. This is for loops that declare no steps,
such as Fabric's. Between a model's call and its backward they compute losses from weights, and gradients of gradients,
for which a step has to be open. The saved-tensor hooks of several models share one stack of the thread, so the steps of
all models end together. For the same reason a call within a user's own hooks (a checkpoint's, say) leaves no step open:
these hooks end before.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.operations import Args, Kwargs, Operation
from sp_lightning.pipeline.torch_private import (
    SavedTensorHooks,
    call_before_compiling,
    explain_graph_break,
    hide_from_dynamo,
    top_saved_tensor_hooks,
    without_compile,
)
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights import autocast, leaf

_PLAIN = "_superpipeline_plain"  # the attribute of a gate's class that holds the plain class

# These methods use `type(self)`: they copy and pickle a module, or write into the class that a GraphModule has alone.
_OF_THE_CLASS = ("__reduce_ex__", "__deepcopy__", "recompile")
_set_class: Any = vars(object)["__class__"].__set__

_backends: weakref.WeakSet[Backend] = weakref.WeakSet()


class Caller(Protocol):
    """Runs the calls of modules that are gates."""

    def call(self, member: Member, forward: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Run the call of a member's module, whose code is `forward`."""


_gates: dict[int, tuple[Caller, Member]] = {}


def install_gate(member: Member, caller: Caller) -> None:
    """Route calls of the member's module to `caller`."""
    module = member.module
    _gates[id(module)] = (caller, member)
    _change_class(module, type(module))


def remove_gate(member: Member) -> None:
    """Undo `install_gate`. Idempotent."""
    module = member.module
    _gates.pop(id(module), None)
    _change_class(module, module.__class__)


def _gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a class's gates, which it remembers among its subclasses while there are any.

    A weak dictionary of ours would be compiled where a model is compiled as a whole, and would miss entries.
    """
    for subclass in type.__subclasses__(plain):
        if vars(subclass).get(_PLAIN) is plain:
            return subclass
    return _make_gate_class(plain)


def _make_gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = types.MethodType(plain.__call__, self)
        gate = _gates.get(id(self))
        if gate is None:
            return forward(*args, **kwargs)
        caller, member = gate
        return caller.call(member, forward, args, kwargs)

    explain_graph_break(__call__, "superpipeline moves weights before and after a unit computes. Compile its units")
    methods: dict[str, Any] = {
        _PLAIN: plain,
        "__call__": __call__,
        "__class__": property(lambda self: plain, _change_class),
    }
    methods |= {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods |= {name: _as_plain(name) for name in _OF_THE_CLASS if hasattr(plain, name)}
    return _subclass_unheard(plain, methods)


class _EndOfMaking(Exception):
    """Stops Python from finishing a class: the rest of it is not wanted."""


class _Catch:
    """An attribute that gets hold of the class in which it is defined, and stops Python from finishing it.

    Python tells a class's attributes of it once it is whole (`__set_name__`), and its bases (`__init_subclass__`) next.
    """

    caught: type[nn.Module]

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        type.__delattr__(owner, name)
        self.caught = owner
        raise _EndOfMaking


def _subclass_unheard(plain: type[nn.Module], contents: dict[str, Any]) -> type[nn.Module]:
    """Make a subclass without telling the class or its metaclass."""
    catch = _Catch()
    try:
        type.__new__(type(plain), plain.__name__, (plain,), {**contents, "_superpipeline_catch": catch})
    except (_EndOfMaking, RuntimeError) as error:  # Python < 3.12 wraps an exception of `__set_name__` in the latter
        if not isinstance(error.__cause__ or error, _EndOfMaking):
            raise
    return catch.caught


def _as_plain(name: str) -> Operation:
    """Make a method that runs the one of this name while the module has its plain class."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = _gates.pop(id(self), None)
        _change_class(self, self.__class__)
        try:
            return getattr(self, name)(*args, **kwargs)
        finally:
            if gate is not None:
                _gates[id(self)] = gate
                _change_class(self, type(self))

    return method


def _change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module a class; a gate keeps a gate's class on top of it."""
    if id(module) in _gates:
        cls = _gate_class(cls)
    _set_class(module, cls)


def compiled_call(module: nn.Module, arguments: Mapping[str, Any]) -> Operation | None:
    """Return the module's call, compiled when it first runs; None where users compile it, or nothing can be fused.

    It is what `module.compile(**arguments)` would leave on the module. A module that the user compiled stays as it is.
    A lone layer of torch (an embedding, a head, an LSTM) is one operation, with nothing to fuse.
    """
    is_lone_layer = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    if is_lone_layer or without_compile(module) is not module or isinstance(module, torch.jit.ScriptModule):
        return None
    return torch.compile(module._call_impl, **arguments)


def keep_out_of_graphs(backend: Backend) -> None:
    """Have `torch.compile` leave the engine's code alone, and drain a backend before it compiles anything."""
    _prepare_to_be_compiled()
    _backends.add(backend)


@functools.cache
def _prepare_to_be_compiled() -> None:
    # These modules are in graphs of units and of hooks. Hiding a package would hide all modules in it.
    visible = (autocast.__name__, leaf.__name__, leaf.__package__)
    hide_from_dynamo(
        module
        for name, module in list(sys.modules.items())
        if name.startswith("sp_lightning.pipeline.") and name not in visible
    )
    call_before_compiling(_drain_backends)


def _drain_backends() -> None:
    """Finish work on the host: no optimizer step may run meanwhile."""
    for backend in list(_backends):
        backend.drain()


class OpenSteps(threading.local):
    """The steps of this thread that stay open, one inside of the other ([Note: steps that stay open])."""

    def __init__(self) -> None:
        self._scopes = ExitStack()
        self.calls = 0  # the number of nested calls of models that are running
        self.models: list[object] = []  # the models whose steps are open
        # The pair of hooks that the last step has left on top of torch's stack.
        self._on_top: SavedTensorHooks | None = None

    def may_begin(self) -> bool:
        """Tell whether a step may stay open: no scope of the user's would end before it."""
        return top_saved_tensor_hooks() == self._on_top

    def open_step(self, model: object, step: AbstractContextManager[None]) -> None:
        """Begin a step of a model and leave it open."""
        self._scopes.enter_context(step)
        self.models.append(model)
        self._on_top = top_saved_tensor_hooks()

    def ending(self) -> AbstractContextManager[object]:
        """Return a scope that ends all of these steps; an exception in it abandons them."""
        self.models = []
        self._on_top = None
        return self._scopes.pop_all()


open_steps = OpenSteps()
