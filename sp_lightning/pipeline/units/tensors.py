"""Tensors in the inputs and outputs of a module, however deeply they are nested."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_in(output: Any) -> list[Tensor]:
    """Return all tensors in a module's output: in containers, dataclasses, and objects such as a distribution."""
    if isinstance(output, Tensor):
        return [output]
    if output is None:
        return []
    found: list[Tensor] = []
    _collect(output, found, set())
    return found


def _collect(output: Any, found: list[Tensor], seen: set[int]) -> None:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif id(leaf) not in seen and (parts := _parts(leaf)):
            seen.add(id(leaf))
            _collect([part.value for part in parts], found, seen)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, zeros of a sparse one included, which has no `nbytes`."""
    return tensor.numel() * tensor.element_size()


def replace_tensors(output: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with its tensors replaced. Objects that torch's pytree does not know are changed in place."""
    return _replace(output, replace, set())


def _replace(output: Any, replace: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return replace(leaf)
        if id(leaf) not in seen and (parts := _parts(leaf)):
            seen.add(id(leaf))
            for part in parts:
                before = [id(tensor) for tensor in tensors_in(part.value)]
                replaced = _replace(part.value, replace, seen)
                if [id(tensor) for tensor in tensors_in(replaced)] != before:  # else its container stays the same one
                    part.replace(replaced)
        return leaf

    return pytree.tree_map(visit, output)


class _Part(NamedTuple):
    """An attribute of an object or an item of a container, and how to put another one in its place."""

    value: Any
    replace: Callable[[Any], object]


def _parts(leaf: Any) -> list[_Part]:
    """Return the parts of an object that may be part of what a module computed; of any other, none."""
    if isinstance(leaf, type | nn.Module) or callable(leaf):
        return []
    parts: list[_Part] = []
    if isinstance(leaf, dict):  # of a class that pytree does not know
        parts = [_Part(value, partial(dict.__setitem__, leaf, key)) for key, value in leaf.items()]
    elif isinstance(leaf, list):
        parts = [_Part(value, partial(list.__setitem__, leaf, index)) for index, value in enumerate(leaf)]
    for slot in slots_of(type(leaf)):
        with suppress(AttributeError):  # nothing is in it
            parts.append(_Part(slot.__get__(leaf), partial(slot.__set__, leaf)))
    attributes = getattr(leaf, "__dict__", {}).items()
    return parts + [_Part(value, partial(object.__setattr__, leaf, name)) for name, value in attributes]


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the attributes that a class, or one that it inherits from, names in `__slots__`."""
    if not hasattr(kind, "__slots__"):
        return []
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [member for of in classes for member in of.values() if isinstance(member, types.MemberDescriptorType)]
