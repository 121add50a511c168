"""Guarded masters: whoever touches a weight outside of its unit finds it finished, or gets it on the device.

Masters have a class with `__torch_function__` from attach to detach, and the guard has two verbs.

*Between steps, settle.* After a backward or an optimizer step, gradients may still be on their way, and weights still
be stepped. The first access to any master waits for all of it, so nobody sees half a step, and only code that looks has
to wait.

*In a step, serve.* `F.linear(x, self.emb.weight)`, an L2 penalty over `self.parameters()`, a parent that reads a weight
of its child, `module.forward(x)` called past `__call__`: none of these enters a unit, so the module tree holds masters,
which lie on the host. An operation on one gets the weight on the device, which is a device parameter from then on.
Reading attributes and writing in place (`p.grad`, `p.data.clamp_()`, `p.copy_()`) still mean the master, so does all
that happens while an optimizer steps.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sp_lightning.pipeline.torch_private import (
    sees_torch_functions,
    tensor_hooks,
    without_torch_function,
)
from sp_lightning.pipeline.weights.graphs import run_hooks
from sp_lightning.pipeline.weights.leaf import guarded
from sp_lightning.pipeline.weights.operands import ON_DEVICE, instances_in, is_metadata, name_of, replace_instances
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight

# What means the master, in a step as well; many of these give an alias of it to write to
_OF_THE_MASTER = {
    "data", "detach", "numpy", "__array__", "cpu", "storage", "untyped_storage", "data_ptr", "__dlpack__",
    "__dlpack_device__", "_version", "retain_grad", "tolist", "__repr__", "__format__",
}  # fmt: skip
_GRADIENT: Any = Tensor.grad
_NAMED_MEMBERS = nn.Module._named_members.__code__


class Guard(ABC):
    """Guards the masters of an arrangement; what follows from an access is decided in a class below."""

    device: torch.device  # the device that forward and backward run on

    def __init__(self, weights: Iterable[Weight]) -> None:
        # whether a step or a backward pass is under way, so that operations on masters get the device's weights
        self.in_step = False
        self.settled = True  # whether nothing is under way that writes masters or their gradients
        self._weights = [weight for weight in weights if not isinstance(weight, QuantizedWeight)]

    @abstractmethod
    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device, in its own dtype from now on."""

    @abstractmethod
    def before_access(self, weight: Weight) -> None:
        """Have a master finished, because somebody outside of the engine looks at it."""

    @abstractmethod
    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Provide a master's `.grad`, because somebody reads it; else note that it is replaced, or deleted."""

    @abstractmethod
    def note_write(self, weight: Weight) -> None:
        """Note that somebody writes to the master, or gets an alias to write to."""

    def install(self) -> None:
        """Guard the masters."""
        guarded.update({id(weight.master): (self, weight) for weight in self._weights})
        self._give_class(HostParameter)

    def remove(self) -> None:
        """Turn the masters back into ordinary Parameters. Idempotent."""
        self._give_class(nn.Parameter)
        for weight in self._weights:
            guarded.pop(id(weight.master), None)

    def _give_class(self, cls: type[nn.Parameter]) -> None:
        for weight in self._weights:
            weight.master.__class__ = cls

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has masters among its arguments."""
        name = name_of(func)
        serves = self.in_step and not optimizer_steps.depth
        if serves and name in ON_DEVICE:
            return func(torch.empty(0, device=self.device), *args[1:])
        if not is_metadata(name):
            writes = name in _OF_THE_MASTER or _is_written_to(name, args, kwargs)
            if serves and not writes:
                return self._run_on_device(func, args, kwargs)
            for master in instances_in((args, kwargs), HostParameter):
                _before_access(master, writes)
        with without_torch_function():
            return func(*args, **kwargs)

    def _run_on_device(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.autograd.grad:
            return _differentiate(*args, **kwargs)
        if func is torch.autograd.backward:
            return func(*args, **{**kwargs, "inputs": [edge for each in kwargs["inputs"] for edge in stand_ins(each)]})
        with without_torch_function():
            args, kwargs = replace_instances((args, kwargs), HostParameter, lambda p: self.serve(_weight_of(p)))
        return func(*args, **kwargs)


class HostParameter(nn.Parameter):
    """The class of masters: same object, same memory, and `isinstance(p, nn.Parameter)` holds."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the operation to the guard of the first master among its arguments."""
        # mostly, an attribute is read or written
        master = args[0] if args and type(args[0]) is cls else next(instances_in((args, kwargs or {}), cls), None)
        found = guarded.get(id(master))
        if found is None:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        guard, weight = found
        if getattr(func, "__self__", None) is _GRADIENT:
            guard.before_gradient(weight, reads=func.__name__ == "__get__")
            with without_torch_function():
                return func(*args)
        return guard.run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        _before_access(self)
        with without_torch_function():
            return nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary Parameter."""
        _before_access(self)
        with without_torch_function():
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        """Hash by identity; a lookup in an optimizer's state is an access, as it leads to what the step writes."""
        found = guarded.get(id(self))
        if found is None or found[0].settled or found[0].in_step or not sees_torch_functions():
            return id(self)
        # `parameters()` looks up what it has yielded already: `model.zero_grad()` must not wait for a step
        if sys._getframe(1).f_code is not _NAMED_MEMBERS:
            _before_access(self)
        return id(self)


def _before_access(master: HostParameter, writes: bool = False) -> None:
    """Have a master finished, before somebody outside of the engine reads it or writes to it."""
    guard, weight = guarded.get(id(master), (None, None))
    if guard is not None and weight is not None and (guard.in_step or not guard.settled):
        guard.before_access(weight)
        if guard.in_step and writes:
            guard.note_write(weight)


def _weight_of(master: HostParameter) -> Weight:
    weight: Weight = guarded[id(master)][1]
    return weight


def _is_written_to(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation writes to a master: in place, or as `out=`."""
    if name.startswith("__i"):
        in_place = name not in ("__invert__", "__index__", "__int__")
    else:
        in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    return next(instances_in((first if in_place else None, kwargs.get("out")), HostParameter), None) is not None


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` with the leaves in place of masters; gradients get the masters' dtype.

    The guard stays in force meanwhile: backward runs checkpoints and hooks, which may use weights.
    """
    if isinstance(inputs, dict):
        found = _differentiate(outputs, list(inputs.values()), *args, **kwargs)
        return dict(zip(inputs, found, strict=True))
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    gradients = list(torch.autograd.grad(outputs, [_stand_in(each) for each in inputs], *args, **kwargs))
    for index, each in enumerate(inputs):
        if isinstance(each, HostParameter) and gradients[index] is not None:
            with without_torch_function():
                gradients[index] = run_hooks(tensor_hooks(each), gradients[index].to(each.dtype))
    return tuple(gradients)


def _stand_in(tensor: Any) -> Any:
    """Return what one gradient is taken with respect to."""
    first, *others = stand_ins(tensor)
    if others:
        raise RuntimeError(
            f"`torch.autograd.grad` cannot differentiate with respect to weight {_weight_of(tensor).name!r} in this "
            "step, which used it both as autocast casts it and as it is. From the next step on it can."
        )
    return first


def stand_ins(tensor: Any) -> list[Any]:
    """Return what stands for a tensor in graphs. Of a master these are edges: leaves may have a class of their own."""
    if not isinstance(tensor, HostParameter):
        return [tensor]
    with without_torch_function():
        weight = _weight_of(tensor)
        return [
            get_gradient_edge(leaf)
            if leaf.requires_grad and leaf is not tensor
            else weight.twin.data.detach().requires_grad_(leaf.requires_grad)  # no graph has it
            for leaf in weight.leaves()
        ]


# ------------------------------------------------------------------------------------- who is exempt from the guard


class EngineAtWork:
    """Scope around the engine's own work in a step: one thread at a time, unseen by the guard.

    It takes a lock because backward on an accelerator runs in a thread of autograd's.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._unseen: AbstractContextManager[Any]

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._unseen = without_torch_function()
            self._unseen.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._unseen.__exit__(*exc_info)
        self._lock.release()

    def __bool__(self) -> bool:
        return self._depth > 0


class _OptimizerSteps(threading.local):
    """The optimizer steps that this thread is in, one inside of the other; they operate on the masters themselves.

    Torch tells nobody of a step that ended with an exception, so the depth is zero again when the next scope opens.
    """

    depth = 0


optimizer_steps = _OptimizerSteps()


@contextmanager
def optimizer_waits() -> Iterator[None]:
    """Have masters guarded in the block: in a closure that an optimizer calls, the model computes again."""
    depth, optimizer_steps.depth = optimizer_steps.depth, 0
    try:
        yield
    finally:
        optimizer_steps.depth = depth
