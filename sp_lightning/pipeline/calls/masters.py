"""The class of masters: it sees operations on them, and finds out which object of the weight each operation means.

The guard decides how to run an operation that means a master, or the weight on the device (guard.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sp_lightning.pipeline.calls.guard import Guard
from sp_lightning.pipeline.calls.nodes import GRADIENT, differentiate, edges_of
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.operations import (
    ABOUT,
    Args,
    Kwargs,
    Meaning,
    Operation,
    instances_in,
    meaning_of,
    replace_instances,
)
from sp_lightning.pipeline.torch_private import storage_key, without_torch_function
from sp_lightning.pipeline.weights.autocast import LoweredParameter, Lowering
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, DepartedLeaf, EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.overrides import see_all_uses
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight

_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward)

# The guard and the weight of each master, by the master's identity.
_guarded: dict[int, tuple[Guard, Weight]] = {}
_guards: WeakSet[Guard] = WeakSet()  # the guards of all attached models


class HostParameter(CopiedPlainly):
    """The class of masters: same object, same memory, and `isinstance(p, nn.Parameter)` holds.

    Copies and pickles are of `p.data`, which the guard sees.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Hand the operation to the guard of the first master among its arguments."""
        kwargs = kwargs or {}
        # mostly, an attribute is read or written
        master = args[0] if args and type(args[0]) is cls else next(iter(instances_in((args, kwargs), cls)), None)
        guard_and_weight = _guarded.get(id(master))
        if guard_and_weight is not None:
            guard, weight = guard_and_weight
            if getattr(func, "__self__", None) is not GRADIENT:
                return run(guard, func, args, kwargs)
            guard.before_gradient(weight, reads=func.__name__ == "__get__")
        with without_torch_function():
            return func(*args, **kwargs)


def _name_master(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Give a module the master where a forward assigns a leaf: the assignment outlives the call."""
    if isinstance(parameter, TwinParameter):
        return parameter.weight.master
    with without_torch_function():
        key = 0 if parameter is None else storage_key(parameter)
    for guard in _guards:
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


def guard_masters(guard: Guard, weights: Iterable[Weight], lowering: Lowering) -> None:
    """Have a guard see all operations on the masters of weights."""
    _guards.add(guard)
    for weight in weights:
        if not isinstance(weight, QuantizedWeight):
            weight.lowering = lowering
            _guarded[id(weight.master)] = guard, weight
            weight.master.__class__ = HostParameter


def release_masters(guard: Guard) -> None:
    """Turn the masters that a guard sees back into ordinary Parameters. Idempotent."""
    _guards.discard(guard)
    for weight in [weight for other, weight in _guarded.values() if other is guard]:
        weight.master.__class__ = nn.Parameter
        weight.lowering = None
        del _guarded[id(weight.master)]


def run(guard: Guard, func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that has masters among its arguments; this guard sees the first one."""
    meaning = meaning_of(func)
    if meaning is Meaning.DEVICE and guard.in_step and not optimizer_steps.depth:
        return func(torch.empty(0, device=guard.device), *args[1:])
    if meaning not in ABOUT:
        # There may be masters of several models, each with its own guard.
        guards_and_weights = [_guarded[id(master)] for master in instances_in((args, kwargs), HostParameter)]
        means_masters = _means_masters(meaning, args, kwargs)
        # Between steps, too, a graph may wait that was built on leaves of weights.
        in_step = func in _OF_GRAPHS or any(guard.in_step for guard, _ in guards_and_weights)
        in_step = in_step and not optimizer_steps.depth
        if in_step and not means_masters:
            return _run_on_device(func, args, kwargs)
        if in_step and any(weight.leaf_count for _, weight in guards_and_weights):
            return _run_on_leaves(func, args, kwargs)
        for guard, weight in guards_and_weights:
            guard.before_access(weight, means_masters)
    with without_torch_function():
        if meaning is Meaning.DATA:
            return _run_on_data(func, args)
        return func(*args, **kwargs)


def _means_masters(meaning: Meaning, args: Args, kwargs: Kwargs) -> bool:
    """Tell whether an operation means masters themselves, also in a step: it writes to them, or returns an alias."""
    if meaning in (Meaning.MEMORY, Meaning.ALIAS, Meaning.DATA):
        return True
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    results = first if meaning is Meaning.IN_PLACE else None, kwargs.get("out")
    return bool(instances_in(results, HostParameter))


def _run_on_data(func: Operation, args: Args) -> Any:
    """Read or set the `.data` of a master."""
    guard, weight = _guarded[id(args[0])]
    if func.__name__ == "__set__":
        guard.before_conversion(weight, args[1])
    elif weight.unit.is_followed:
        return args[0].detach()  # this counts the process's writes, which are not allowed in a step
    return func(*args)


def _run_on_leaves(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that means masters; some of them have leaves in the module tree."""
    if meaning_of(func) is Meaning.DATA:  # leaves have a property of their own for this attribute
        leaf = _leaf_in_tree(args[0])
        if func.__name__ == "__get__":
            return leaf.data
        leaf.data = args[1]
        return None
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _leaf_in_tree)
    return func(*args, **kwargs)


def _leaf_in_tree(master: HostParameter) -> nn.Parameter:
    _, weight = _guarded[id(master)]
    return weight.twin.parameter if weight.leaf_count else master


def _run_on_device(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    if func is torch.autograd.grad:
        args, kwargs = replace_instances((args, kwargs), HostParameter, lambda master: _guarded[id(master)][1])
        return differentiate(*args, **kwargs)
    if func is torch.autograd.backward:
        return func(*args, **{**kwargs, "inputs": in_graphs(kwargs["inputs"])})
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _served)
    return func(*args, **kwargs)


def _served(master: HostParameter) -> nn.Parameter:
    guard, weight = _guarded[id(master)]
    return guard.serve(weight)


def in_graphs(tensors: Iterable[Tensor]) -> list[Any]:
    """Return tensors, with each master replaced by the edges that stand for it in graphs."""
    inputs: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, HostParameter):
            inputs += edges_of(_guarded[id(tensor)][1])
        else:
            inputs.append(tensor)
    return inputs
