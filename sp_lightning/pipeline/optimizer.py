"""Noticing that an optimizer steps.

The user's own optimizer steps the masters, which are ordinary CPU Parameters. All the engine has to know is *when* it
does, wherever it is called from: torch's hooks for all optimizers tell.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.guard import resume_guards, suspend_guards


class _Listener(Protocol):
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are there, and the optimizer is about to update its parameters."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """It has."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: _Listener) -> None:
    """Tell `listener` of every optimizer step."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _listeners.add(listener)


def stop_listening(listener: _Listener) -> None:
    """Undo `listen_to_optimizers`."""
    _listeners.discard(listener)
    if not _listeners:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    suspend_guards(sys._getframe(1))  # the frame of torch's wrapper around `step`
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        _tell(optimizer)
        return None
    # gradients are there only when the optimizer has called the closure
    if len(args) > 1:
        return (args[0], _then_tell(optimizer, closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": _then_tell(optimizer, closure)}


def _then_tell(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_more() -> Any:
        result = closure()
        _tell(optimizer)
        return result

    return closure_and_more


def _tell(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.before_optimizer_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    resume_guards()
    for listener in list(_listeners):
        listener.after_optimizer_step(optimizer)
