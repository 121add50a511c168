"""Operations that `__torch_function__` is told of, and the tensors among their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ON_DEVICE = {"device", "is_cuda", "is_xpu", "is_mps", "is_cpu", "get_device"}
"""What transformers' `model.device` and the like ask to place inputs: in a step, the answer is the device."""
_METADATA = {
    "shape", "dtype", "layout", "ndim", "requires_grad", "grad_fn", "names", "has_names", "nbytes", "itemsize",
    "output_nr", "retains_grad", "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "size", "dim",
    "ndimension", "numel", "nelement", "stride", "storage_offset", "storage_type", "element_size", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "__len__", *ON_DEVICE,
}  # fmt: skip
OF_THE_DTYPE = {"dtype", "element_size", "itemsize", "nbytes"}
"""What a weight that is sent in another dtype answers as its master does."""
_CONTAINERS = (list, tuple, dict)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast lowers operands on this type of device now; None if it is off."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of an operation, or of the attribute that it reads, sets or deletes."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__  # type: ignore[attr-defined]
    return name


def is_metadata(name: str) -> bool:
    """Tell whether an operation asks what is true of a weight that is not finished, on the host and on the device."""
    return name in _METADATA or (name.startswith("is_") and name != "is_nonzero")


def instances_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield the instances of a class among an operation's arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, kind):
                yield item
            elif isinstance(item, _CONTAINERS):  # mostly, it is neither, and a generator for it would be a waste
                yield from instances_in(item, kind)


def replace_instances(value: Any, kind: type, substitute: Callable[[Any], Any]) -> Any:
    """Return a value with the instances of a class replaced that lie in containers which torch's pytree knows."""
    return pytree.tree_map_only(kind, substitute, value)


def run_hooks(hooks: Iterable[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    """Run hooks of `Tensor.register_hook`, and return what they make of a gradient, where it was."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.to(gradient.device)
    return gradient
