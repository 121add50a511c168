"""Users' hooks on weights, which get gradients on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor


def run_hooks(hooks: Iterable[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    """Run hooks of `Tensor.register_hook`, and return what they make of a gradient, where it was."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.to(gradient.device)
    return gradient
