"""The engine at work in a step, which is told from what others do with masters."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from sp_lightning.pipeline._private import without_torch_function


class EngineAtWork:
    """Around the engine's own work in a step: one thread at a time, and its reads of masters mean the masters.

    Backward of a CUDA graph runs in a thread of autograd's, hence the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unguarded: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        unguarded = without_torch_function()
        unguarded.__enter__()
        self._unguarded.append(unguarded)

    def __exit__(self, *exc_info: Any) -> None:
        self._unguarded.pop().__exit__(*exc_info)
        self._lock.release()

    def __bool__(self) -> bool:
        return bool(self._unguarded)
