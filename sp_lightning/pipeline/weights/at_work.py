"""A scope around the engine's own work in a step, to tell it from what others do with masters."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from sp_lightning.pipeline.torch_private import without_torch_function


class EngineAtWork:
    """Scope around the engine's own work in a step: one thread at a time, unseen by the guard of masters.

    It takes a lock because backward on an accelerator runs in a thread of autograd's.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._scopes: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        scope = without_torch_function()
        scope.__enter__()
        self._scopes.append(scope)

    def __exit__(self, *exc_info: Any) -> None:
        self._scopes.pop().__exit__(*exc_info)
        self._lock.release()

    def __bool__(self) -> bool:
        return bool(self._scopes)
