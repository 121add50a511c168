"""Looks at a unit's state and arguments, around its first forwards: does a forward change what a second one would read?

[Note: what a look compares]
A look compares numbers and texts, at any depth of tuples, lists, dicts, sets, partials, methods, and objects that are
nothing but their attributes. It compares tensors by identity and version, and small ones by their numbers, too, as
kernels write to running statistics without a version. Classes, functions, enums, weak references, loggers and torch's
operators stand for themselves. Everything else counts as changed, as does a value that leads to too many others. So a
look reads no memory map and no data set, and a kind that is not listed here is on the safe side.
"""

from __future__ import annotations

import enum
import gc
import logging
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from sp_lightning.pipeline.tensors_in import MOST_OBJECTS, NUMBERS_AND_TEXTS, STATE_OF_MODULES, numpy
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, TwinParameter

_SMALL_BUFFER = 1 << 19  # bytes; running statistics are smaller, masks and position tables larger
_COMPARED = 1 << 16  # bytes of a tensor, or of an array
_PLAIN = NUMBERS_AND_TEXTS | {range, slice, type(...), torch.layout, torch.memory_format}
# kinds whose objects may have a state that no forward reads, or that no code sees
_BY_IDENTITY = (
    type, enum.Enum, ModuleType, FunctionType, logging.Logger, torch._ops.OperatorBase, torch._ops.OpOverloadPacket,
    ref, fx.Graph, numpy.number, numpy.bool_,
)  # fmt: skip
_CALLABLES = (partial, MethodType, BuiltinFunctionType)


def may_change(value: Any) -> bool:
    """Tell whether an argument of a unit may change until backward, by any code."""
    kind = type(value)
    if kind in _CALLABLES:
        return any(map(may_change, gc.get_referents(value)))
    if isinstance(value, Tensor):  # the second forward gets another one, without attributes that a user has set
        has_slots = kind.__basicsize__ > Tensor.__basicsize__
        return not isinstance(value, nn.Parameter) and (has_slots or bool(vars(value)))
    return not (kind in _PLAIN or isinstance(value, (nn.Module, *_BY_IDENTITY)))


class Snapshot:
    """A look at modules and at the arguments of their call, before a forward ([Note: what a look compares])."""

    def __init__(self, modules: Sequence[nn.Module], given: Sequence[Any]) -> None:
        self._modules = modules
        # arguments that may change are not looked at: a unit that gets one keeps its saved tensors anyway
        self._given = [value for value in given if not may_change(value)]
        self._seen: list[Any] = []  # objects in pictures; holding them keeps their identities from being given again
        self._before = dict(self._read())

    def obstacle(self) -> str | None:
        """Return the reason, as a phrase, why the forward that is over cannot run again; None if none was seen."""
        after = dict(self._read())
        changed = [key for key in {**self._before, **after} if self._before.get(key) != after.get(key)]
        return changed[0][1] if changed else None

    def _read(self) -> Iterator[tuple[tuple[int, str], object]]:
        """Yield pictures, each with a number and the meaning of a difference."""
        generators = pickle.dumps((random.getstate(), numpy.random.get_state()))
        yield (0, "draws random numbers that are not torch's"), generators
        yield (0, "changes what it is given"), self._digest([*self._given])
        for number, module in enumerate(self._modules):
            if _parts_of(module) is None:
                yield (number, "has slots, or is a dict, which cannot be compared"), object()
            yield (number, "replaces a part of itself"), [*map(id, module._modules.values())]
            # a weight of ours is there as its master or as its twin
            others = {name: value for name, value in module._parameters.items() if not isinstance(value, CopiedPlainly)}
            for name, value in {**others, **vars(module)}.items():
                if name not in STATE_OF_MODULES:
                    difference = f"changes its attribute {name!r} (or that cannot be compared)"
                    yield (number, difference), self._digest([value])

    def _digest(self, waiting: list[Any]) -> object:
        """Return the contents of values, to be compared; if they are unknown, an object that is equal to no other."""
        picture: list[object] = []
        self._seen.append(waiting)
        known = set(map(id, self._modules))
        for value in waiting:  # it grows
            kind = type(value)
            if kind in _PLAIN:
                picture.append((kind, value))
            elif id(value) in known or isinstance(value, _BY_IDENTITY):
                picture.append(id(value))
            else:
                known.add(id(value))
                parts = _parts_of(value)
                if parts is None or len(waiting) + len(parts) > MOST_OBJECTS:
                    return object()
                waiting += parts
                picture.append((kind if _is_container(value) else id(value), len(parts)))
        return picture


def _is_container(value: Any) -> bool:
    return type(value) in (list, set, frozenset, dict, OrderedDict) or isinstance(value, tuple)


def _parts_of(value: Any) -> list[Any] | None:
    """Return all that an object holds; None if it may hold anything else."""
    kind = type(value)
    if isinstance(value, CopiedPlainly):
        return [version_of(value)]
    if kind in (dict, OrderedDict):
        return [*value, *value.values()]
    if _is_container(value) or kind in _CALLABLES:
        return gc.get_referents(value)
    if kind is numpy.ndarray and value.nbytes <= _COMPARED and not value.dtype.hasobject:
        return [str(value.dtype), value.shape, value.tobytes()]
    # with slots, or a base class in C, objects would take more memory
    plain = Tensor if isinstance(value, Tensor) else nn.Module
    if (kind.__basicsize__, kind.__dictoffset__) != (plain.__basicsize__, plain.__dictoffset__):
        return None
    return [vars(value), version_of(value), _numbers_of(value)] if plain is Tensor else [vars(value)]


def _numbers_of(tensor: Tensor) -> str:
    """Return a small tensor's numbers; nothing if it has none, as on the meta device."""
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.nbytes <= _COMPARED:
        with suppress(RuntimeError):
            return str(tensor.tolist())
    return ""


def is_small_buffer(tensor: Tensor) -> bool:
    """Tell whether a tensor is a buffer that is copied for the second forward: it is small, and lies in memory."""
    if isinstance(tensor, nn.Parameter) or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BUFFER


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version. For a master, this waits until the work on it is done, as it does for any reader."""
    with without_torch_function() if isinstance(tensor, TwinParameter) else nullcontext():
        return 0 if tensor.is_inference() else tensor._version
