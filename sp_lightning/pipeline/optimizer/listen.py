"""Hearing of optimizers' steps: torch has hooks on the steps of all optimizers, whoever calls them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.weights.guard import begin_optimizer_step, end_optimizer_step, optimizer_waits


class Listener(Protocol):
    """What hears of the steps of all optimizers."""

    def before_closure(self) -> None:
        """Called before an optimizer calls its closure; it may have written to its parameters since the last call."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called when gradients are there, before the optimizer updates its parameters."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer has updated its parameters."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: Listener) -> None:
    """Notify `listener` of every optimizer step."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _listeners.add(listener)


def stop_listening(listener: Listener) -> None:
    """Undo `listen_to_optimizers`."""
    _listeners.discard(listener)
    if not _listeners:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    begin_optimizer_step()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        _tell(optimizer)
        return None
    # there are no gradients before the optimizer has called the closure
    if len(args) > 1:
        return (args[0], _then_tell(optimizer, closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": _then_tell(optimizer, closure)}


def _then_tell(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_more() -> Any:
        for listener in list(_listeners):
            listener.before_closure()
        with optimizer_waits():  # the closure computes, and may do so outside of modules
            result = closure()
        _tell(optimizer)
        return result

    return closure_and_more


def _tell(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    end_optimizer_step()
    for listener in list(_listeners):
        listener.after_step(optimizer)
