"""Noticing that an optimizer stepped.

The user's own optimizer steps the masters, which are ordinary CPU Parameters. All the engine has to know is *that* it
did, wherever it was called from: torch's hooks for all optimizers tell.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.guard import resume_guards, suspend_guards


class _Listener(Protocol):
    def weights_changed(self) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: _Listener) -> None:
    """Call `listener.weights_changed()` after every optimizer step."""
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


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    suspend_guards(sys._getframe(1))  # the frame of torch's wrapper around `step`


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    resume_guards()
    for listener in list(_listeners):
        listener.weights_changed()
