"""Gates: modules whose calls go through the engine.

[Note: a subclass, not forward hooks]
A module that is a gate has a subclass of its own class, made once for each class, as `fully_shard` does; the subclass
surrounds `__call__`. Forward hooks would do the same job worse: torch's fast paths (`nn.TransformerEncoderLayer` in
evaluation) look for hooks and compute other numbers when they see some, `always_call` hooks miss a KeyboardInterrupt,
`block.compile()` compiles hooks into the graph, and a deepcopy of the module takes them along. An attribute of the
instance would do it, too, but `block.compile()` and shallow copies pass it by.

The subclass is always on top: `module.__class__` is the class below it, and that is what changes when one is assigned.
So parametrizations come and go as ever, which torch keeps in a class that it puts below. Copies and pickles of a gate
are plain modules.

Nobody hears of these subclasses: no metaclass that wants arguments or counts calls, no `__init_subclass__` that keeps a
registry or raises. And they derive from the plain class alone, so whatever the memory of its instances looks like
(`Generic`, `ABC`, `__slots__` or `dict` among the bases), Python lets an instance change between the two.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from sp_lightning.pipeline.torch_private import explain_graph_break
from sp_lightning.pipeline.units.unit import Member

if TYPE_CHECKING:
    from sp_lightning.pipeline.calls.calls import Calls


_PLAIN = "_superpipeline_plain"  # the attribute of a gate's class that has the plain class

# methods that ask for `type(self)`: to copy and to pickle it, and a GraphModule's, to write into the class it has alone
_OF_THE_CLASS = ("__reduce_ex__", "__deepcopy__", "recompile")
_set_class: Any = vars(object)["__class__"].__set__

_gates: dict[int, tuple[Calls, Member]] = {}


def install_gate(member: Member, calls: Calls) -> None:
    """Route calls of the member's module to `calls`."""
    _gates[id(member.module)] = (calls, member)
    _change_class(member.module, type(member.module))


def remove_gate(member: Member) -> None:
    """Undo `install_gate`. Idempotent."""
    if _gates.pop(id(member.module), None) is not None:
        _change_class(member.module, member.module.__class__)


def _gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a class's gates, which it remembers among its subclasses while there are any.

    A weak dictionary of ours would be compiled where a model is compiled as a whole, and miss what it has.
    """
    for subclass in type.__subclasses__(plain):
        if vars(subclass).get(_PLAIN) is plain:
            return subclass
    return _make_gate_class(plain)


def _make_gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = types.MethodType(plain.__call__, self)
        found = _gates.get(id(self))
        return forward(*args, **kwargs) if found is None else found[0].call(found[1], forward, args, kwargs)

    explain_graph_break(__call__, "superpipeline moves weights before and after a unit computes; compile its units")
    methods: dict[str, Any] = {_PLAIN: plain, "__call__": __call__}
    methods["__class__"] = property(lambda self: plain, _change_class)
    methods |= {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods |= {name: _as_plain(name) for name in _OF_THE_CLASS if hasattr(plain, name)}
    return _subclass_unheard(plain, methods)


class _EndOfMaking(Exception):
    """Nothing that is left of the making of a class is wanted."""


class _Catch:
    """An attribute of a class that is being made, which gets hold of the class, and ends its making there.

    Python tells a class's attributes of it once it is whole (`__set_name__`), and its bases (`__init_subclass__`) next.
    """

    caught: type[nn.Module]

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        type.__delattr__(owner, name)
        self.caught = owner
        raise _EndOfMaking


def _subclass_unheard(plain: type[nn.Module], contents: dict[str, Any]) -> type[nn.Module]:
    """Make a subclass of which neither the class nor its metaclass hears."""
    catch = _Catch()
    try:
        type.__new__(type(plain), plain.__name__, (plain,), {**contents, "_superpipeline_catch": catch})
    except (_EndOfMaking, RuntimeError) as error:  # which Python < 3.12 makes of what `__set_name__` raises
        if not isinstance(error.__cause__ or error, _EndOfMaking):
            raise
    return catch.caught


def _as_plain(name: str) -> Callable[..., Any]:
    """Make a method that runs the one of this name while the module has its plain class."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = _gates.pop(id(self), None)
        _change_class(self, self.__class__)
        try:
            return getattr(self, name)(*args, **kwargs)
        finally:
            if found is not None:
                _gates[id(self)] = found
                _change_class(self, type(self))

    return method


def _change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module a class, below that of a gate if it is one."""
    _set_class(module, _gate_class(cls) if id(module) in _gates else cls)
