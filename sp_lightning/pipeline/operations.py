"""The meaning of operations on weights, the tensors among their operands, and those in other objects.

Torch tells `__torch_function__` of each operation on an instance of its class. A weight has several objects (a master,
a leaf, values on the device), and the operation's name tells which of them the program means.

[Note: which object an operation means]
    what it asks for     of a master, in a step        of a leaf that was dropped     of a lowered leaf (autocast.py)
    DEVICE               the device                    the leaf                       the leaf
    DTYPE                the master                    the leaf                       the master
    METADATA             the master                    the leaf                       the leaf
    GRADIENT             the gradient, as `.grad`      the master                     the leaf
    MEMORY               its leaf, or the master (*)   the leaf                       the leaf
    ALIAS, DATA          its leaf, or the master (*)   the master                     the weight in its own dtype
    IN_PLACE             its leaf, or the master (*)   the master                     the weight in its own dtype
    VALUES               the weight on the device      the master                     a leaf for each cast, or as above

(*) The leaf if a module has it, and else the master. Between steps, a master means itself, once what is under way has
ended. guard.py has the first column, weight.py the second.

[Note: tensors in anything]
All arguments and outputs of a unit are searched for tensors, so that no weight can hide there. Python's garbage
collector knows which objects an object refers to: its slots and attributes, the rest of an iterator, the arguments of a
partial, a closure's variables, a generator's locals. The search asks it, and so runs no code of a user's. It leaves out
objects that a unit shares with the rest of the program: classes, Python's modules, a function's global variables. It
also leaves out weights that an `nn.Module` has registered, because masters take their places again when a call ends.

[Note: what cannot be looked into]
The collector does not see references that an object holds in C or C++: an array of numpy's, a storage, a capsule, an
object of an extension. For torch and numpy the search knows the way. Numbers, texts, and other objects of Python's own
library that the collector does not follow hold no tensors. Anything else counts as hidden, as does an object that would
take the search beyond its limit. The search goes level by level, so it finds the tensors near the top in any case. Its
caller decides about hidden objects.
"""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import local
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.torch_private import parts_of, without_torch_function

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


numpy: Any = sys.modules["numpy"]  # torch imports it
NUMBERS_AND_TEXTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
"""Types of values that refer to nothing, and do not change."""
_PLAIN = NUMBERS_AND_TEXTS | {type, CodeType, ModuleType}
_NUMPYS_AND_TORCHS = (
    numpy.generic, numpy.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.finfo, torch.iinfo,
    torch.Generator, torch.Stream, torch.Event,
)  # fmt: skip
# These refer to capsules and to objects of C++, and to no tensors.
_NOT_OF_INTEREST = (
    type, torch._ops.OperatorBase, torch._ops.OpOverloadPacket, numpy.random.BitGenerator, numpy.random.Generator,
    numpy.random.RandomState,
)  # fmt: skip
# These have values per thread or per context, where the collector does not look.
_HIDING = (local, ContextVar)
_KNOWN_TO_COLLECTOR = 1 << 14  # `Py_TPFLAGS_HAVE_GC`
MOST_OBJECTS = 100_000
"""The objects that a search looks at: a value may lead to the whole program, with its data."""

STATE_OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""The attributes that torch itself gives a module, or an RNN."""
_NOT_SEARCHED = STATE_OF_MODULES - {"_buffers", "_modules"}


def tensors_in(value: Any, hidden: list[Any] | None = None) -> list[Tensor]:
    """Return all tensors in a value, each once, and the plain ones that others consist of.

    Args:
        value: A tensor, or anything else.
        hidden: If given, objects that cannot be searched are added to it ([Note: what cannot be looked into]).
    """
    if type(value) is Tensor and value.layout is torch.strided and not value.__dict__:
        return [value]
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [value]  # the list grows, and so keeps everything alive whose identity was seen
    for item in waiting:
        kind = type(item)
        if kind in _PLAIN or id(item) in seen:
            continue
        seen.add(id(item))
        inner: Sequence[Any] | None
        if kind is tuple or kind is list:
            inner = item
        elif kind is dict:
            inner = [*item, *item.values()]
        elif isinstance(item, Tensor):
            found.append(item)
            inner = [*item.__dict__.values(), *parts_of(item)]  # with itself, if it is a plain one
        else:
            inner = _referents(item)
        if inner is not None and len(waiting) + len(inner) <= MOST_OBJECTS:
            waiting += inner
        elif hidden is not None:
            hidden.append(item)
    return found


def _referents(item: Any) -> Sequence[Any] | None:
    """Return the objects that an object refers to; None if they cannot be known."""
    kind = type(item)
    if issubclass(kind, _NOT_OF_INTEREST):
        return ()
    if kind is FunctionType:
        return item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__
    if kind is FrameType:
        return (item.f_locals,)
    if issubclass(kind, nn.Module):
        return [inner for name, inner in vars(item).items() if name not in _NOT_SEARCHED]
    if issubclass(kind, numpy.ndarray):
        # an array over a tensor's memory has the tensor as its base
        return item.base, *(item.flat if item.dtype.hasobject else ())
    if kind is torch.UntypedStorage:
        return (torch.empty(0, dtype=torch.uint8, device=item.device).set_(item),)
    if issubclass(kind, _HIDING) or not all(map(_hides_nothing, kind.__mro__)):
        return None
    return gc.get_referents(item)


def _hides_nothing(kind: type) -> bool:
    """Tell whether the collector sees all that a class adds to its bases, or these additions hold no objects."""
    if kind.__flags__ & _KNOWN_TO_COLLECTOR or kind.__basicsize__ == object.__basicsize__:
        return True
    if issubclass(kind, _NUMPYS_AND_TORCHS):
        return True
    is_of_python = any(base.__module__.partition(".")[0] in sys.stdlib_module_names for base in kind.__mro__[:-1])
    return is_of_python and kind.__name__ != "PyCapsule"
