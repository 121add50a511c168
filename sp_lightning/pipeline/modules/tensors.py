"""Tensors in the inputs and outputs of a module, however deeply they are nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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
        elif (attributes := _attributes(leaf)) and id(leaf) not in seen:
            seen.add(id(leaf))
            _collect(list(attributes.values()), found, seen)


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
        if (attributes := _attributes(leaf)) and id(leaf) not in seen:
            seen.add(id(leaf))
            for name, value in attributes.items():
                before = [id(tensor) for tensor in tensors_in(value)]
                replaced = _replace(value, replace, seen)
                if [id(tensor) for tensor in tensors_in(replaced)] != before:  # else its container stays the same one
                    object.__setattr__(leaf, name, replaced)
        return leaf

    return pytree.tree_map(visit, output)


def _attributes(leaf: Any) -> dict[str, Any]:
    """Return the attributes of an object that may be part of what a module computed; of any other, none."""
    if isinstance(leaf, type | nn.Module) or callable(leaf):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {
            field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)
        }
    return dict(getattr(leaf, "__dict__", {}))
