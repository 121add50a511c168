"""Tensors in the inputs and outputs of a module, however deeply they are nested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_in(output: Any) -> list[Tensor]:
    """Return all tensors in a module's output: in containers, and in objects such as a dataclass."""
    if isinstance(output, Tensor):
        return [output]
    found: list[Tensor] = []
    if output is not None:
        _collect(output, found, set())
    return found


def _collect(output: Any, found: list[Tensor], seen: set[int]) -> None:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif id(leaf) not in seen and not (isinstance(leaf, type | nn.Module) or callable(leaf)):
            seen.add(id(leaf))
            items = leaf.values() if isinstance(leaf, dict) else leaf if isinstance(leaf, list) else ()
            _collect([*items, *getattr(leaf, "__dict__", {}).values()], found, seen)


def replace_tensors(output: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with the tensors replaced that lie in containers which torch's pytree knows."""
    return pytree.tree_map(lambda leaf: replace(leaf) if isinstance(leaf, Tensor) else leaf, output)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, zeros of a sparse one included, which has no `nbytes`."""
    return tensor.numel() * tensor.element_size()
