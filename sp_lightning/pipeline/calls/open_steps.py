"""Steps that stay open: a call begins one, and what follows belongs to it, up to its backward or an optimizer's step.

This is for loops whose steps nobody declares, as Fabric's are. Between a model's call and its backward they compute
losses from weights, and gradients of gradients, for which a step has to be open.

The hooks for saved tensors of several models are one stack of the thread, so the steps of all models end together. For
the same reason a call within a user's own hooks (a checkpoint's, say) leaves nothing open: these end before.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack

from sp_lightning.pipeline.torch_private import SavedTensorHooks, top_saved_tensor_hooks


class OpenSteps(threading.local):
    """The steps of this thread that stay open, one inside of the other."""

    def __init__(self) -> None:
        self._scopes = ExitStack()
        self.calls = 0  # of models that are running, one inside of the other
        self._models: list[object] = []
        self._on_top: SavedTensorHooks | None = None  # what the last one has left on top of torch's stack

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def may_begin(self) -> bool:
        """Tell whether no scope of the user's would end before a step that began now."""
        return top_saved_tensor_hooks() == self._on_top

    def begin(self, model: object, step: AbstractContextManager[None]) -> None:
        """Begin a step of a model and leave it open."""
        self._scopes.enter_context(step)
        self._models.append(model)
        self._on_top = top_saved_tensor_hooks()

    def ending(self) -> AbstractContextManager[object]:
        """Return a scope with which all of them end; if by an exception, they are abandoned."""
        self._models = []
        self._on_top = None
        return self._scopes.pop_all()


open_steps = OpenSteps()
