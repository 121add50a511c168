"""Gates: modules whose calls go through the engine.

[Note: a subclass, not forward hooks]
A module that is a gate gets a subclass of its own class, made on the fly, as `fully_shard` does; the subclass surrounds
`__call__`. Forward hooks would do the same job worse: torch's fast paths (`nn.TransformerEncoderLayer` in evaluation)
look for hooks and compute other numbers when they see some, `always_call` hooks miss a KeyboardInterrupt,
`block.compile()` compiles hooks into the graph, and a deepcopy of the module takes them along. A deepcopy or a pickle
of a gate has the plain class. The class of a parametrized module stays on top: torch edits it, and takes it off again.

[Note: users who ask for a class]
`module.__class__` is the plain class, as in `super(self.__class__, self).forward(x)`; a class that users assign becomes
that of a gate. The subclass equals the plain class, for users and libraries who ask `type(module) == nn.Linear`, or
look a module's class up in a table, and what they assign to it (`type(self).steps += 1`) becomes an attribute of the
plain class. `type(module) is nn.Linear` tells them apart. So modules keep their own classes until their pipeline is
first used (first_call.py): `configure_optimizers` may choose param groups by class.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import unwrap
from typing import Any, Protocol

from torch import nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from sp_lightning.pipeline.torch_private import explain_graph_break, is_dynamo_at_work
from sp_lightning.pipeline.weights.units import Member


class Gatekeeper(Protocol):
    """The pipeline, as far as gates know it."""

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call with its weights on the device."""


_PLAIN = "_superpipeline_plain"  # the attribute of a gate's class that has the plain class

_set_class: Any = vars(object)["__class__"].__set__

_gates: dict[int, tuple[Gatekeeper, Member]] = {}
_gate_classes: dict[type, type] = {}


def register_gate(member: Member, keeper: Gatekeeper) -> None:
    """Route calls of the member's module to `keeper`, once `install_gate` has made the module a gate.

    Raises:
        ValueError: If the module belongs to another pipeline.
    """
    module = member.module
    if id(module) in _gates:
        raise ValueError(
            f"Module {member.name!r} ({type(module).__name__}) already belongs to a pipeline. Detach that one first."
        )
    _gates[id(module)] = (keeper, member)


def install_gate(member: Member) -> None:
    """Make the member's module a gate."""
    _set_class(member.module, _with_gate(type(member.module)))


def remove_gate(member: Member) -> None:
    """Undo `register_gate` and `install_gate`."""
    if _gates.pop(id(member.module), None) is not None:
        _set_class(member.module, _without_gate(type(member.module)))


def keeper_of(module: nn.Module) -> tuple[Gatekeeper, Member] | None:
    """Return where calls of a module are routed; None if they are nobody's business."""
    return _gates.get(id(module))


@contextmanager
def _without_init_subclass(plain: type) -> Iterator[None]:
    """Keep a class's own `__init_subclass__` (a registry, say) from hearing of its gate."""
    own = vars(plain).get("__init_subclass__")
    plain.__init_subclass__ = classmethod(lambda cls, **kwargs: None)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del plain.__init_subclass__
        else:
            plain.__init_subclass__ = own  # type: ignore[method-assign]


def _with_gate(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class with a gate: below the class of a parametrized module, which torch changes and removes again."""
    if not _is_parametrized(plain):
        return _gate_class(plain)
    parametrized: type[nn.Module] = _on_top_of(tuple(_with_gate(base) for base in plain.__bases__), plain)
    if "__deepcopy__" in vars(plain):
        plain_deepcopy = unwrap(vars(plain)["__deepcopy__"])

        @wraps(plain_deepcopy)
        def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
            return _as_plain(self, lambda: plain_deepcopy(self, memo))

        parametrized.__deepcopy__ = __deepcopy__  # type: ignore[attr-defined]
    return parametrized


def _is_parametrized(cls: type) -> bool:
    """Tell whether it is a class that torch made for one module, to keep the properties of parametrizations in."""
    return "__getstate__" in vars(cls) and cls.__module__ == parametrize.__name__


def _on_top_of(bases: tuple[type, ...], cls: type) -> type:
    """Return a copy of a class on top of other bases."""
    contents = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(contents))


@cache
def _metaclass_of_gates(metaclass: Any) -> Any:
    """Return the metaclass of gates whose plain classes have this one."""

    class GateMeta(metaclass):  # type: ignore[misc]
        """Lets a gate pass for its plain class."""

        def __new__(cls: Any, name: str, bases: tuple[type, ...], contents: dict[str, Any]) -> Any:
            return type.__new__(cls, name, bases, contents)  # the plain class's own metaclass may register classes

        def __init__(cls: type, *_: object) -> None:
            pass

        def __eq__(cls: type, other: object) -> bool:
            plain = _plain_of_gate(cls)
            if cls is other or plain is None or is_dynamo_at_work():  # which finds what `super()` means by comparing
                return cls is other
            return plain == other

        def __hash__(cls: type) -> int:
            plain = _plain_of_gate(cls)
            return hash(plain) if plain is not None else metaclass.__hash__(cls)

        def __setattr__(cls: type, name: str, value: object) -> None:
            metaclass.__setattr__(_owner_of(cls, name), name, value)

        def __delattr__(cls: type, name: str) -> None:
            metaclass.__delattr__(_owner_of(cls, name), name)

    copyreg.pickle(GateMeta, _reduce_gate)
    return GateMeta


def _reduce_gate(cls: type) -> str | tuple[Any, ...]:
    """Have a gate's class pickled as its plain class; those derived from gates as any class."""
    plain = _plain_of_gate(cls)
    return cls.__qualname__ if plain is None else (copy.copy, (plain,))


def _owner_of(cls: type, name: str) -> type:
    """Return the class to whose attributes one belongs that is assigned to `cls`."""
    plain = _plain_of_gate(cls)
    return cls if plain is None or name in vars(cls) else plain


def _plain_of_gate(cls: type) -> type | None:
    """Return the plain class of a gate; None for all other classes, those derived from gates included."""
    plain: type | None = vars(cls).get(_PLAIN)
    return plain


def _gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _gate_classes:
        _gate_classes[plain] = _make_gate_class(plain)
    return _gate_classes[plain]


def _make_gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain_call = types.MethodType(plain.__call__, self)
        found = keeper_of(self)
        if found is None:
            return plain_call(*args, **kwargs)
        keeper, member = found
        return keeper.call(member, plain_call, args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        return _as_plain(self, lambda: self.__reduce_ex__(protocol))

    explain_graph_break(__call__, "superpipeline moves weights before and after a unit computes; compile its units")
    methods: dict[str, Any] = {
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "__class__": property(_visible_class, _change_class),
    }
    if hasattr(plain, "__deepcopy__"):

        def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
            return _as_plain(self, lambda: self.__deepcopy__(memo))

        methods["__deepcopy__"] = __deepcopy__
    if issubclass(plain, GraphModule):

        def recompile(self: Any) -> Any:
            """Write the generated methods into the plain class, which each GraphModule has for itself."""
            return _as_plain(self, lambda: self.recompile())

        methods["recompile"] = recompile
    metaclass: Any = type(plain)
    with _without_init_subclass(plain):
        gate: type[nn.Module] = _metaclass_of_gates(metaclass)(plain.__name__, (plain,), methods)
    gate.__module__, gate.__qualname__, gate.__doc__ = plain.__module__, plain.__qualname__, plain.__doc__
    setattr(gate, _PLAIN, plain)  # last: from now on, attributes belong to the plain class
    return gate


def _visible_class(module: nn.Module) -> type:
    """Return the plain class of a gate; the class itself if a parametrization has put its own on top of a gate."""
    return _plain_of_gate(type(module)) or type(module)


def _change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    _set_class(module, cls if hasattr(cls, _PLAIN) or keeper_of(module) is None else _with_gate(cls))


def _as_plain(module: nn.Module, action: Callable[[], Any]) -> Any:
    """Run an action while the module has its plain class."""
    gate = type(module)
    _set_class(module, _without_gate(gate))
    try:
        return action()
    finally:
        _set_class(module, gate)


def _without_gate(cls: type) -> type:
    """Return the class without the gate, even if a parametrization has put its own subclass on top in the meantime."""
    plain = _plain_of_gate(cls)
    if plain is not None:
        return plain
    if hasattr(cls, _PLAIN):
        return _on_top_of(tuple(_without_gate(base) for base in cls.__bases__), cls)
    return cls
