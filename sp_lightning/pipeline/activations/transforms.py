"""Transforms of `torch.func` that differentiate (`grad`, `vjp`, `jacrev`, `hessian`) allow no saved-tensor hooks.

Torch refuses to begin one while there are any. A step has those of the engine around all that a model does, also where
a loss differentiates a function that has no weights. So the engine's hooks step aside for as long as a transform runs.
Weights that are used in one stay on the device (see calls.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch.autograd import graph

from sp_lightning.pipeline._private import (
    SavedTensorHooks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)

_disable: Any = graph.disable_saved_tensors_hooks


@runtime_checkable
class StepsAside(Protocol):
    """What saved-tensor hooks of the engine are methods of."""

    def before_transform(self) -> None:
        """Prepare for a transform: what is saved in it will not be seen."""


def watch_transforms() -> None:
    """Have the engine's hooks step aside for transforms."""
    graph.disable_saved_tensors_hooks = _disable_but_ours  # which transforms call


def stop_watching_transforms() -> None:
    """Undo `watch_transforms`."""
    graph.disable_saved_tensors_hooks = _disable


@contextmanager
def _disable_but_ours(error_message: str) -> Iterator[None]:
    aside = []
    while (hooks := top_saved_tensor_hooks()) is not None and isinstance(ours := _owner(hooks), StepsAside):
        ours.before_transform()
        pop_saved_tensor_hooks()
        aside.append(hooks)
    try:
        with _disable(error_message):
            yield
    finally:
        for hooks in reversed(aside):
            push_saved_tensor_hooks(hooks)


def _owner(hooks: SavedTensorHooks) -> object:
    return getattr(hooks[0], "__self__", None)
