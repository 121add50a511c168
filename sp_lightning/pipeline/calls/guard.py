"""Guarded masters: whoever touches a weight outside of its unit finds it finished, or gets it on the device.

Masters have a class with `__torch_function__` from attach to detach, and the guard (outside.py) has two verbs.

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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sp_lightning.pipeline.operands import instances_in, run_hooks
from sp_lightning.pipeline.torch_private import sees_torch_functions, tensor_hooks, without_torch_function
from sp_lightning.pipeline.weights.leaf import guarded
from sp_lightning.pipeline.weights.weight import Weight

# Many of these give an alias of the master to write to
_OF_THE_MASTER = {
    "data", "detach", "numpy", "__array__", "cpu", "storage", "untyped_storage", "data_ptr", "__dlpack__",
    "__dlpack_device__", "_version", "retain_grad", "tolist", "__repr__", "__format__",
}  # fmt: skip
_GRADIENT: Any = Tensor.grad
_NAMED_MEMBERS = nn.Module._named_members.__code__


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
        if found is not None:
            guard, weight = found
            if getattr(func, "__self__", None) is not _GRADIENT:
                return guard.run(func, args, kwargs or {})
            guard.before_gradient(weight, reads=func.__name__ == "__get__")
        with without_torch_function():
            return func(*args, **(kwargs or {}))

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
        if found is None or found[0].window.settled or found[0].in_step or not sees_torch_functions():
            return id(self)
        # `parameters()` looks up what it has yielded already: `model.zero_grad()` must not wait for a step
        if sys._getframe(1).f_code is not _NAMED_MEMBERS:
            _before_access(self)
        return id(self)


def _before_access(master: HostParameter) -> None:
    """Have a master finished, before somebody outside of the engine reads it."""
    found = guarded.get(id(master))
    if found is not None:
        guard, weight = found
        guard.before_access(weight)


def weight_of(master: HostParameter) -> Weight:
    """Return the weight of a guarded master."""
    return guarded[id(master)][1]


def means_the_master(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation means a master itself, in a step as well: it writes to it, or gives an alias of it."""
    if name in _OF_THE_MASTER:
        return True
    if name.startswith("__i"):
        in_place = name not in ("__invert__", "__index__", "__int__")
    else:
        in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    return next(instances_in((first if in_place else None, kwargs.get("out")), HostParameter), None) is not None


def differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` with the leaves in place of masters; gradients get the masters' dtype.

    The guard stays in force meanwhile: backward runs checkpoints and hooks, which may use weights.
    """
    if isinstance(inputs, dict):
        found = differentiate(outputs, list(inputs.values()), *args, **kwargs)
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
            f"`torch.autograd.grad` cannot differentiate with respect to weight {weight_of(tensor).name!r} in this "
            "step, which used it both as autocast casts it and as it is. From the next step on it can."
        )
    return first


def stand_ins(tensor: Any) -> list[Any]:
    """Return what stands for a tensor in graphs. Of a master these are edges: leaves may have a class of their own."""
    if not isinstance(tensor, HostParameter):
        return [tensor]
    with without_torch_function():
        weight = weight_of(tensor)
        leaves = [leaf for leaf in (weight.twin.parameter, *weight.lowered_leaves) if leaf.requires_grad]
        if tensor.requires_grad and leaves:
            return list(map(get_gradient_edge, leaves))
        return [weight.twin.data.detach().requires_grad_(tensor.requires_grad)]  # no graph has it
