"""The meaning of operations on weights, and the tensors among their operands.

Torch tells `__torch_function__` of each operation on an instance of its class. A weight has several objects (a master,
a leaf, values on the device), and the operation's name tells which of them the program means.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.torch_private import without_torch_function

Operation: TypeAlias = Callable[..., Any]
"""An operation of torch's, or the call of a module."""
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


class Meaning(enum.Enum):
    """The object or fact of a weight that an operation asks for."""

    DEVICE = enum.auto()
    """The device that it is on. transformers' `model.device` and the like ask for it to place inputs."""
    DTYPE = enum.auto()
    """Its dtype, and facts that follow from that. It is the master's, even while other bytes are sent."""
    METADATA = enum.auto()
    """Facts that hold on the host and on the device, even while the weight is updated."""
    GRADIENT = enum.auto()
    """Its gradient."""
    MEMORY = enum.auto()
    """The memory of this very object."""
    ALIAS = enum.auto()
    """An alias of the master, to which code may write later, or its values on the host."""
    DATA = enum.auto()
    """Its `.data`, which code sets, or reads in order to write to it."""
    IN_PLACE = enum.auto()
    """A place for the result: the operation writes to its first operand."""
    VALUES = enum.auto()
    """Its values."""


ABOUT = (Meaning.DEVICE, Meaning.DTYPE, Meaning.METADATA)
"""Questions about a weight that need none of its values."""

_NAMES: dict[Meaning, tuple[str, ...]] = {
    Meaning.DEVICE: ("device", "is_cuda", "is_xpu", "is_mps", "is_cpu", "get_device"),
    Meaning.DTYPE: ("dtype", "element_size", "itemsize", "nbytes"),
    Meaning.METADATA: (
        "shape", "layout", "ndim", "requires_grad", "grad_fn", "names", "has_names", "output_nr", "retains_grad",
        "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "size", "dim", "ndimension", "numel", "nelement",
        "stride", "storage_offset", "storage_type", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "__len__",
    ),
    Meaning.GRADIENT: ("grad",),
    Meaning.MEMORY: ("_version", "untyped_storage"),
    Meaning.ALIAS: (
        "detach", "numpy", "__array__", "cpu", "storage", "data_ptr", "__dlpack__", "__dlpack_device__",
        "retain_grad", "tolist", "__repr__", "__format__",
    ),
    Meaning.DATA: ("data",),
    Meaning.VALUES: ("is_nonzero", "__invert__", "__index__", "__int__"),
}  # fmt: skip
_MEANINGS = {name: meaning for meaning, names in _NAMES.items() for name in names}
_CONTAINERS = (list, tuple, dict)


@lru_cache(maxsize=1024)
def meaning_of(func: Operation) -> Meaning:
    """Return the object or fact of a weight that an operation asks for."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # of an attribute, whose name counts
        name = func.__self__.__name__  # type: ignore[attr-defined]
    if name in _MEANINGS:
        return _MEANINGS[name]
    if name.startswith("is_"):
        return Meaning.METADATA
    is_operator = name.startswith("__")
    in_place = name.startswith("__i") or name == "__setitem__" if is_operator else name.endswith("_")
    return Meaning.IN_PLACE if in_place else Meaning.VALUES


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast lowers operands on this type of device now; None if it is off."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def instances_in(value: Any, kind: type) -> list[Any]:
    """Return the instances of a class among an operation's arguments, in their order."""
    found = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, _CONTAINERS):
            pending += reversed(item.values() if isinstance(item, dict) else item)
    return found


def replace_instances(value: Any, kind: type, substitute: Callable[[Any], Any]) -> Any:
    """Return a value in which instances of a class are replaced, in all containers that torch's pytree knows."""
    return pytree.tree_map_only(kind, substitute, value)


@contextmanager
def untracked() -> Iterator[None]:
    """Compute on values alone: the results are plain and have no history, and no class is asked about operations."""
    with torch.inference_mode(False), torch.no_grad(), without_torch_function():
        yield


def run_hooks(hooks: Iterable[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    """Run hooks of `Tensor.register_hook` on a gradient, and return the result, in the place of the gradient."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.to(gradient.device)
    return gradient
