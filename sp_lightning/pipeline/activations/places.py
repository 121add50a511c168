"""The kinds of places where a forward may leave a trace, and how each is read, compared and written.

A list, the attributes of an object, a generator of random numbers: effects.py remembers what is in such a place before
a forward. For a container that is a shallow copy of it; for all else, numbers.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
import types
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

_LARGEST_ARRAY = 1 << 22  # bytes, of numpy; a data set is larger
_OPEN = (types.SimpleNamespace, Namespace, SobolEngine)  # not defined by users, but with content of theirs
_NOT_USER_DEFINED = {"torch", __name__.partition(".")[0], *sys.stdlib_module_names}

PLAIN = {str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device}


def is_user_defined(definition: type | types.FunctionType) -> bool:
    """Tell whether a class or function may hold what a forward changes, unlike a logger or a process group."""
    return (definition.__module__ or "").partition(".")[0] not in _NOT_USER_DEFINED


class Place(ABC):
    """A place with a content that is one immutable value, unless a subclass says otherwise.

    Args:
        holder: The object whose content this is.
    """

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    @abstractmethod
    def read(self) -> Any:
        """Return the present content, which does not change any more."""

    @abstractmethod
    def write(self, content: Any) -> None:
        """Put back a content of this place."""

    def values(self, content: Any) -> Collection[Any]:
        """Return the objects that a content consists of."""
        return ()

    def is_same(self, before: Any, after: Any) -> bool:
        """Tell whether two contents are the same: the same numbers, or the same objects."""
        return bool(before == after)

    def with_copies(self, content: Any, copies: Mapping[int, Any]) -> Any:
        """Return a content with copies, by the identity of the original, in place of objects."""
        return content


# ------------------------------------------------------------------------------------------------------------- numbers


class _Generator(Place):
    holder: torch.Generator

    def read(self) -> Tensor:
        return self.holder.get_state()

    def write(self, content: Tensor) -> None:
        self.holder.set_state(content)

    def is_same(self, before: Tensor, after: Tensor) -> bool:
        return torch.equal(before, after)


class _PythonGenerator(Place):
    holder: random.Random

    def read(self) -> Any:
        return self.holder.getstate()

    def write(self, content: Any) -> None:
        self.holder.setstate(content)


class _NumpyGenerator(Place):
    """A `numpy.random.Generator` or `RandomState`."""

    def read(self) -> bytes:
        return pickle.dumps(self.holder._bit_generator.state)  # which may hold an array

    def write(self, content: bytes) -> None:
        self.holder._bit_generator.state = pickle.loads(content)  # noqa: S301  # what `read` has made


class _NumpyArray(Place):
    def read(self) -> bytes:
        return bytes(self.holder.tobytes())

    def write(self, content: bytes) -> None:
        memoryview(self.holder).cast("B")[:] = content


class _Bytes(Place):
    holder: bytearray

    def read(self) -> bytes:
        return bytes(self.holder)

    def write(self, content: bytes) -> None:
        self.holder[:] = content


# ---------------------------------------------------------------------------------------------------------- containers


class _Row(Place):
    """A list or a deque."""

    holder: list[Any] | deque[Any]

    def read(self) -> list[Any]:
        return list(self.holder)

    def write(self, content: Iterable[Any]) -> None:
        self.holder.clear()
        self.holder.extend(content)

    def values(self, content: list[Any]) -> Collection[Any]:
        return content

    def is_same(self, before: list[Any], after: list[Any]) -> bool:
        return len(before) == len(after) and all(map(operator.is_, before, after))

    def with_copies(self, content: list[Any], copies: Mapping[int, Any]) -> list[Any]:
        return [copies.get(id(value), value) for value in content]


class _Cell(_Row):
    """A variable of a function, in which there may be nothing yet."""

    holder: Any

    def read(self) -> list[Any]:
        try:
            return [self.holder.cell_contents]
        except ValueError:
            return []

    def write(self, content: Iterable[Any]) -> None:
        del self.holder.cell_contents
        for value in content:
            self.holder.cell_contents = value


class _Set(Place):
    holder: set[Any]

    def read(self) -> set[Any]:
        return set(self.holder)

    def write(self, content: set[Any]) -> None:
        self.holder.clear()
        self.holder.update(content)

    def values(self, content: set[Any]) -> Collection[Any]:
        return content

    def with_copies(self, content: set[Any], copies: Mapping[int, Any]) -> set[Any]:
        return {copies.get(id(value), value) for value in content}


class _Dict(Place):
    holder: dict[Any, Any]

    def read(self) -> dict[Any, Any]:
        return dict(self.holder)

    def write(self, content: dict[Any, Any]) -> None:
        # as a plain dictionary: a class of its own may refuse it, or do more
        kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
        kind.clear(self.holder)
        kind.update(self.holder, content)

    def values(self, content: dict[Any, Any]) -> Collection[Any]:
        return content.values()

    def is_same(self, before: dict[Any, Any], after: dict[Any, Any]) -> bool:
        return list(before) == list(after) and all(map(operator.is_, before.values(), after.values()))

    def with_copies(self, content: dict[Any, Any], copies: Mapping[int, Any]) -> dict[Any, Any]:
        return {key: copies.get(id(value), value) for key, value in content.items()}


class _AttributesOfModule(_Dict):
    _OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights"})  # the latter is an RNN's list of weights

    def __init__(self, module: nn.Module) -> None:
        super().__init__(vars(module))

    def read(self) -> dict[str, Any]:
        return {name: value for name, value in self.holder.items() if name not in self._OF_TORCH}

    def write(self, content: dict[str, Any]) -> None:
        for name in self.read():
            del self.holder[name]
        self.holder.update(content)


class _AttributesOfWeights(_Dict):
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        weights = [vars(weight) for module in modules for weight in module._parameters.values() if weight is not None]
        self._of_each = [vars(of["master"]) if "master" in of else of for of in weights]
        super().__init__(self._of_each)

    def read(self) -> dict[Any, Any]:
        return {(number, name): value for number, of in enumerate(self._of_each) for name, value in of.items()}

    def write(self, content: dict[Any, Any]) -> None:
        for of in self._of_each:
            of.clear()
        for (number, name), value in content.items():
            self._of_each[number][name] = value


class _Slots(_Dict):
    """The attributes of an object that its class names in `__slots__`."""

    def __init__(self, holder: Any, slots: Iterable[types.MemberDescriptorType]) -> None:
        super().__init__(holder)
        self._slots = slots

    def read(self) -> dict[Any, Any]:
        content = {}
        for slot in self._slots:
            with suppress(AttributeError):  # nothing is in it
                content[slot] = slot.__get__(self.holder)
        return content

    def write(self, content: dict[Any, Any]) -> None:
        for slot in self.read():
            slot.__delete__(self.holder)
        for slot, value in content.items():
            slot.__set__(self.holder, value)


# ------------------------------------------------------------------------------------------ where objects have places

_KINDS: dict[type, Callable[[Any], Place]] = {
    dict: _Dict,
    list: _Row,
    set: _Set,
    deque: _Row,
    types.CellType: _Cell,
    bytearray: _Bytes,
    random.Random: _PythonGenerator,
    torch.Generator: _Generator,
}


def places_of(value: Any) -> list[Place]:
    """Return the places where an object keeps what it holds, if a forward may change that."""
    if isinstance(value, random.SystemRandom):  # which has no state
        return []
    content: list[Place] = [make(value) for kind, make in _KINDS.items() if isinstance(value, kind)]
    return content + attributes_of(value) + _content_of_numpy(value)


def attributes_of(value: Any) -> list[Place]:
    """Return the places of an object's attributes, with and without `__slots__`, if its class is one of a user's."""
    if not (is_user_defined(type(value)) or isinstance(value, _OPEN)):
        return []
    places: list[Place] = []
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):  # unlike those of a class
        places.append(_Dict(attributes))
    slots = slots_of(type(value))
    if slots:
        places.append(_Slots(value, slots))
    return places


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the attributes that a class, or one that it inherits from, names in `__slots__`."""
    if not hasattr(kind, "__slots__"):
        return []
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [member for of in classes for member in of.values() if isinstance(member, types.MemberDescriptorType)]


def attributes_of_module(module: nn.Module) -> Place:
    """Return the attributes of a module that its own code may change, without torch's bookkeeping and its weights."""
    return _AttributesOfModule(module)


def attributes_of_weights(modules: Iterable[nn.Module]) -> Place:
    """Return the attributes that users have set on the weights of modules: those of a leaf are its master's."""
    return _AttributesOfWeights(modules)


def _content_of_numpy(value: Any) -> list[Place]:
    """Return the numbers in an object of numpy, which need not be installed."""
    kind = type(value)
    if kind.__module__.startswith("numpy.random") and hasattr(value, "_bit_generator"):
        return [_NumpyGenerator(value)]
    if (kind.__module__, kind.__name__) != ("numpy", "ndarray"):
        return []
    is_open = value.flags.c_contiguous and value.flags.writeable and 0 < value.nbytes <= _LARGEST_ARRAY
    return [_NumpyArray(value)] if is_open and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 else []
