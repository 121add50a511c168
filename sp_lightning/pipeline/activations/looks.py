"""Looks at what a unit has and is given, around its first forwards: does a forward change what a second one would read?

[Note: what a look compares]
A picture of a value is what its pickle would hold, at any depth. Besides, an object is compared by its attributes and
slots, whatever its own `__getstate__` or `__reduce__` leaves out. Tensors are compared by identity, version and bytes,
as kernels write to running statistics without a version; large ones by identity and version. A module that is not part
of the unit, but is given or kept somewhere, is looked into like any object. Few kinds stand for themselves: classes,
functions, enums, locks, weak references, torch's dtypes and operators, loggers. What has no pickle counts as changed,
so that a kind which nobody has thought of is on the safe side.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import logging
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from threading import Lock, RLock
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ProxyType, ref

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from sp_lightning.pipeline.tensors_in import NUMBERS_AND_TEXTS, STATE_OF_MODULES
from sp_lightning.pipeline.torch_private import parts_of, without_torch_function
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, TwinParameter

numpy: Any = sys.modules["numpy"]  # torch imports it
_SMALL = 1 << 16  # bytes; running statistics are smaller, masks and position tables larger
_COMPARED_BYTES = 1 << 24  # of a tensor, in a look
_PROTOCOL = 5
_MOST_OBJECTS = 100_000  # in a picture; what leads to more, as to a whole Trainer, counts as changed
_PLAIN = NUMBERS_AND_TEXTS | {range, slice, type(...), torch.layout, torch.memory_format}
# kinds whose objects may have a state in which no forward is interested, or that nobody sees
_BY_IDENTITY = (
    type, enum.Enum, ModuleType, FunctionType, logging.Logger, torch._ops.OperatorBase, torch._ops.OpOverloadPacket,
    torch.Stream, torch.Event, fx.Graph,
)  # fmt: skip
_EXACTLY_BY_IDENTITY = frozenset({ref, ProxyType, type(Lock()), type(RLock()), object})


def may_change(value: Any) -> bool:
    """Tell whether what is given to a unit may be another until backward, whoever changes it."""
    kind = type(value)
    if kind in (MethodType, BuiltinFunctionType):
        return may_change(value.__self__)
    if kind is frozenset:
        return any(map(may_change, value))
    if kind is Tensor:  # the second forward gets another one, without attributes that a user has set
        return bool(value.__dict__)
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and bool(attributes_of(value))
    return not (kind in _PLAIN or isinstance(value, (nn.Module, numpy.generic)) or _stands_for_itself(value))


def _stands_for_itself(value: Any) -> bool:
    return type(value) in _EXACTLY_BY_IDENTITY or isinstance(value, _BY_IDENTITY)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots as well, and what it holds as a dict."""
    found = dict(getattr(value, "__dict__", {}))
    if isinstance(value, dict):
        found["[...]"] = list(value.items())
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # nothing is there
                    found[name] = member.__get__(value)
    return found


class Look:
    """A look at modules and at what their call is given, before a forward ([Note: what a look compares])."""

    def __init__(self, modules: Sequence[nn.Module], given: Sequence[Any]) -> None:
        self._modules = modules
        # what may change is not looked at: a unit that is given such a thing keeps what it saves anyway
        self._given = [value for value in given if not may_change(value)]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        self._large_buffers = [buffer for buffer in buffers if not is_small_buffer(buffer)]
        self._seen: list[Any] = []  # objects in pictures; holding them keeps their identities from being given again
        self._before = dict(self._read())

    def obstacle(self) -> str | None:
        """Return what keeps the forward, which is over, from running again, as a phrase; None if nothing was seen."""
        after = dict(self._read())
        for key in {**self._before, **after}:
            if self._before.get(key) != after.get(key):
                _, difference = key
                return difference
        return None

    def _read(self) -> Iterator[tuple[tuple[int, str], object]]:
        """Yield pictures by a number and what a difference means."""
        generators = [random.getstate(), numpy.random.get_state()]
        yield (0, "draws random numbers that are not torch's"), self._picture(generators)
        yield (0, "changes what it is given"), self._picture(self._given)
        yield (0, "changes a large buffer in place"), self._picture(self._large_buffers)
        for number, module in enumerate(self._modules):
            yield (number, "replaces a part of itself"), [*map(id, module._modules.values())]
            # a weight of ours is there as its master or as its twin
            others = {name: value for name, value in module._parameters.items() if not isinstance(value, CopiedPlainly)}
            for name, value in {**others, **attributes_of(module)}.items():
                if name not in STATE_OF_MODULES:
                    difference = f"changes its attribute {name!r} (or that cannot be pickled, to be compared)"
                    yield (number, difference), self._picture(value)

    def _picture(self, value: Any) -> object:
        digest = hashlib.blake2b()
        reader = _Reader(SimpleNamespace(write=digest.update), protocol=_PROTOCOL)
        reader.seen = self._seen
        reader.known = set(map(id, self._modules))
        try:
            reader.dump(value)
        except Exception:  # whatever a class's own code raises
            return object()  # which is equal to no other
        return digest.digest()


class _Reader(pickle.Pickler):
    """Pickles what is to be compared, to bytes that nobody reads back."""

    seen: list[Any]
    known: set[int]
    objects = 0

    def persistent_id(self, value: Any) -> Any:
        """Return what is compared instead of a value; None if that is its pickle."""
        kind = type(value)
        if kind in _PLAIN:
            return None
        self.objects += 1
        if self.objects > _MOST_OBJECTS:
            raise pickle.PicklingError("there is too much to compare")
        if kind is torch.Generator:
            return value.get_state().numpy().tobytes()
        if id(value) in self.known or isinstance(value, CopiedPlainly) or _stands_for_itself(value):
            self.seen.append(value)
            return id(value), version_of(value) if isinstance(value, Tensor) else 0
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of an object's picture, as its reduction: what it keeps back is in it, too."""
        self.seen.append(value)
        state: list[Any] = [attributes_of(value)]
        if isinstance(value, Tensor):
            state += [id(value), version_of(value), tuple(value.shape), [*map(_digest_of_tensor, parts_of(value))]]
        elif isinstance(value, nn.Module):
            state.append(id(value))
        else:
            reduce = copyreg.dispatch_table.get(type(value))
            reduction = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
            if not isinstance(reduction, str):  # a name; else a tuple, in which items come by iterators
                items = [list(iterator) for iterator in reduction[3:5] if iterator is not None]
                reduction = [*reduction[:3], *items]
            state.append(reduction)
        return list, (), state  # which nobody makes


def is_small_buffer(tensor: Tensor) -> bool:
    """Tell whether a tensor is a buffer that is copied for the second forward: it is small, and lies in memory."""
    if isinstance(tensor, nn.Parameter) or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version; that of a master once what is under way with it is done, as for any other reader."""
    with without_torch_function() if isinstance(tensor, TwinParameter) else nullcontext():
        return 0 if tensor.is_inference() else tensor._version


def _digest_of_tensor(tensor: Tensor) -> bytes | None:
    """Return a digest of a plain tensor's bytes; None if it is too large, or has none."""
    with without_torch_function():
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.nbytes > _COMPARED_BYTES:
            return None
        plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu()
        return hashlib.blake2b(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
