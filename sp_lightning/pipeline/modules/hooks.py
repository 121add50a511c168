"""Calls of modules: the gate around `__call__`, and the hook that runs before backward.

[Note: a subclass, not forward hooks]
A module that is a gate gets a subclass of its own class, made on the fly, as `fully_shard` does; the subclass surrounds
`__call__`. Forward hooks would do the same job worse: torch's fast paths (`nn.TransformerEncoderLayer` in evaluation)
look for hooks and compute other numbers when they see some, `always_call` hooks miss a KeyboardInterrupt,
`block.compile()` compiles hooks into the graph, and a deepcopy of the module takes them along. A deepcopy or a pickle
of a gate has the plain class. The class of a parametrized module stays on top: torch edits it, and takes it off again.
The subclass equals the plain class, for users and libraries who ask `type(module) == nn.Linear`, or look a module's
class up in a table; only `type(module) is nn.Linear` tells them apart.

[Note: before backward]
Hooks on output tensors are lost when a view is modified in place (`y += x`, pytorch#181832). The node that made the
tensor (its base, for a view) stays in the graph in every case, so the hook is registered there. A view that a custom
autograd function returns has a base from before its graph, or from inside of it, but cannot be modified in place.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from sp_lightning.pipeline._private import explain_graph_break, is_dynamo_at_work
from sp_lightning.pipeline.weights.units import Member

if TYPE_CHECKING:
    from sp_lightning.pipeline.weights.graphs import Graph


class Gatekeeper(Protocol):
    """The pipeline, as far as gates know it."""

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call with its weights on the device."""


_WATCHED_AT = "superpipeline"  # keys in a node's metadata
_NEEDED_BY = "superpipeline leaf"
_PLAIN = "_superpipeline_plain"  # the attribute of a gate's class that has the plain class

_gates: dict[int, tuple[Gatekeeper, Member]] = {}
_gate_classes: dict[type, type] = {}


def install_gate(member: Member, keeper: Gatekeeper) -> None:
    """Have calls of the member's module go through `keeper`.

    Raises:
        ValueError: If the module belongs to another pipeline.
    """
    module = member.module
    if id(module) in _gates:
        raise ValueError(
            f"Module {member.name!r} ({type(module).__name__}) already belongs to a pipeline. Detach that one first."
        )
    _gates[id(module)] = (keeper, member)
    module.__class__ = _with_gate(type(module))


def remove_gate(member: Member) -> None:
    """Undo `install_gate`."""
    module = member.module
    if _gates.pop(id(module), None) is not None:
        module.__class__ = _without_gate(type(module))


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
def _equal_to_plain(metaclass: Any) -> Any:
    """Return the metaclass of gates whose plain classes have this one: a gate equals its plain class."""

    def __eq__(cls: type, other: object) -> bool:
        plain = _plain_of_gate(cls)
        if cls is other or plain is None or is_dynamo_at_work():  # which finds what `super()` means by comparing
            return cls is other
        return plain == other

    def __hash__(cls: type) -> int:
        plain = _plain_of_gate(cls)
        return hash(plain) if plain is not None else metaclass.__hash__(cls)

    return type(metaclass.__name__, (metaclass,), {"__eq__": __eq__, "__hash__": __hash__})


def _plain_of_gate(cls: type) -> type | None:
    """Return the plain class of a gate; None for all other classes, those derived from gates included."""
    plain: type | None = vars(cls).get(_PLAIN)
    return plain


def _gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _gate_classes:
        _gate_classes[plain] = _make_gate_class(plain)
    return _gate_classes[plain]


def _make_gate_class(plain: type[nn.Module]) -> type[nn.Module]:
    plain_call = plain.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = _gates.get(id(self))
        if found is None:
            return plain_call(self, *args, **kwargs)
        keeper, member = found
        return keeper.call(member, plain_call.__get__(self), args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = _as_plain(self, lambda: self.__reduce_ex__(protocol))
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (plain.__new__, *reduced[1:])  # `__newobj__` insists on the object's own class, the gate
        return reduced

    explain_graph_break(__call__, "superpipeline moves weights before and after a unit computes; compile its units")
    methods: dict[str, Any] = {"__call__": __call__, "__reduce_ex__": __reduce_ex__, _PLAIN: plain}
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
        gate: type[nn.Module] = types.new_class(
            plain.__name__, (plain,), {"metaclass": _equal_to_plain(metaclass)}, lambda body: body.update(methods)
        )
    gate.__module__, gate.__qualname__, gate.__doc__ = plain.__module__, plain.__qualname__, plain.__doc__
    return gate


def _as_plain(module: nn.Module, action: Callable[[], Any]) -> Any:
    """Run an action while the module has its plain class."""
    gate = type(module)
    module.__class__ = _without_gate(gate)
    try:
        return action()
    finally:
        module.__class__ = gate


def _without_gate(cls: type) -> type:
    """Return the class without the gate, even if a parametrization has put its own subclass on top in the meantime."""
    plain = _plain_of_gate(cls)
    if plain is not None:
        return plain
    if hasattr(cls, _PLAIN):
        return _on_top_of(tuple(_without_gate(base) for base in cls.__bases__), cls)
    return cls


def before_backward(outputs: list[Tensor], action: Callable[[], None], since: int, now: int) -> None:
    """Run an action before backward reaches the nodes with which a call made its outputs.

    A call that passes an input through has not computed it. The node of such an output belongs to an earlier call,
    whose weights would have to make room for this call's at the very moment at which they are needed.

    Args:
        outputs: The tensors that the call returned.
        action: Called before backward reaches each of their nodes.
        since: The number of calls when this one began.
        now: The number of calls now.
    """
    nodes = set(map(_node_that_stays, outputs)) - {None}

    def run(_: Any) -> None:
        action()

    for node in nodes:
        if node.metadata.setdefault(_WATCHED_AT, now) >= since:
            node.register_prehook(run)


def _node_that_stays(output: Tensor) -> Any:
    """Return the node that made a tensor or its base; None if it has none."""
    base = output._base
    if base is None or base.grad_fn is None or isinstance(output.grad_fn, BackwardCFunction):
        return output.grad_fn
    return base.grad_fn


def hold_while_needed(leaf: nn.Parameter, graph: Graph, reached: Callable[[Graph], None]) -> None:
    """Keep `graph` alive for as long as an autograd graph waits to give this leaf its gradient, and no longer.

    A leaf does not hold the node that accumulates its gradient; graphs that were built on it do.

    Args:
        leaf: A leaf that requires a gradient.
        graph: The graph to keep alive.
        reached: Called with each graph that is held here, when backward reaches the leaf.
    """
    node = get_gradient_edge(leaf).node
    metadata: Any = node.metadata
    if _NEEDED_BY not in metadata:
        held: list[Graph] = []
        metadata[_NEEDED_BY] = held

        def run(_: Any) -> None:
            for each in held:
                reached(each)

        node.register_prehook(run)
    graphs = metadata[_NEEDED_BY]
    if graph not in graphs:  # a loss that is kept keeps the node alive over several steps, and so for several graphs
        graphs[:] = [*(other for other in graphs if not other.done), graph]
