"""The class of masters: how the guard intercepts operations on them, and which of these mean the masters themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sp_lightning.pipeline.calls.graphs import GRADIENT
from sp_lightning.pipeline.operands import instances_in, name_of, replace_instances
from sp_lightning.pipeline.torch_private import storage_key, without_torch_function
from sp_lightning.pipeline.weights.autocast import LoweredParameter
from sp_lightning.pipeline.weights.departed import DepartedLeaf
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.overrides import see_all_uses
from sp_lightning.pipeline.weights.weight import Twin, Weight

# Many of these give an alias of the master to write to
_OF_THE_MASTER = {
    "data", "detach", "numpy", "__array__", "cpu", "storage", "untyped_storage", "data_ptr", "__dlpack__",
    "__dlpack_device__", "_version", "retain_grad", "tolist", "__repr__", "__format__",
}  # fmt: skip


class GuardOfMasters(Protocol):
    """Decides what follows from access to masters (guard.py)."""

    in_step: bool
    twins_by_memory: dict[int, Twin]

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has masters among its arguments."""

    def before_access(self, weight: Weight, writes: bool = False) -> None:
        """Finish what is under way with a master that code outside of the engine reads, or writes to."""

    def before_conversion(self, weight: Weight, values: Tensor) -> None:
        """Prepare for values of another shape or dtype, which a master gets."""

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Put a master's gradient into its `.grad` if somebody reads it; else drop it, because it is replaced."""

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device in its own dtype, for an operation outside of its unit."""


# The guard and the weight of each master, by the master's identity.
guarded: dict[int, tuple[GuardOfMasters, Weight]] = {}
guards: WeakSet[GuardOfMasters] = WeakSet()  # the guards of all attached models


class HostParameter(CopiedPlainly):
    """The class of masters: same object, same memory, and `isinstance(p, nn.Parameter)` holds.

    Copies and pickles are of `p.data`, which the guard sees.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the operation to the guard of the first master among its arguments."""
        kwargs = kwargs or {}
        # mostly, an attribute is read or written
        master = args[0] if args and type(args[0]) is cls else next(instances_in((args, kwargs), cls), None)
        guard_and_weight = guarded.get(id(master))
        if guard_and_weight is not None:
            guard, weight = guard_and_weight
            if getattr(func, "__self__", None) is not GRADIENT:
                return guard.run(func, args, kwargs)
            guard.before_gradient(weight, reads=func.__name__ == "__get__")
        with without_torch_function():
            return func(*args, **kwargs)


def _name_master(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Give a module the master where a forward assigns a leaf: the assignment outlives the call."""
    if isinstance(parameter, TwinParameter):
        return parameter.weight.master
    with without_torch_function():
        key = 0 if parameter is None else storage_key(parameter)
    for guard in guards:
        twin = guard.twins_by_memory.get(key)
        if twin is not None:
            raise RuntimeError(
                f"A forward gives {type(module).__name__} a Parameter {name!r} over the memory of weight "
                f"{twin.weight.name!r} on the device, which other weights get after the call. Make it of a clone: "
                "`nn.Parameter(weight.detach().clone())`."
            )
    return None


# This runs once in a process, when the engine is imported: code may bind torch's functions to names of its own.
see_all_uses((HostParameter, DepartedLeaf, LoweredParameter), (EagerLeaf, LoweredParameter, TwinParameter))
register_module_parameter_registration_hook(_name_master)  # type: ignore[arg-type]


def means_the_master(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation means a master itself, also in a step: it writes to the master, or returns an alias."""
    if name in _OF_THE_MASTER:
        return True
    if name.startswith("__i"):
        in_place = name not in ("__invert__", "__index__", "__int__")
    else:
        in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    return next(instances_in((first if in_place else None, kwargs.get("out")), HostParameter), None) is not None


def run_on_leaves(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that means masters, some of which have leaves in the module tree."""
    if name_of(func) == "data":  # leaves have a property of their own for this attribute
        leaf = _leaf_in_tree(args[0])
        if func.__name__ == "__get__":
            return leaf.data
        leaf.data = args[1]
        return None
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _leaf_in_tree)
    return func(*args, **kwargs)


def _leaf_in_tree(master: HostParameter) -> nn.Parameter:
    _, weight = guarded[id(master)]
    return weight.twin.parameter if weight.leaf_count else master
