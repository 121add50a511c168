"""Who is at work: the engine, one thread at a time, or an optimizer's step. The guard of weights lets both pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sp_lightning.pipeline.lanes.forks import FORKED, OfOneProcess
from sp_lightning.pipeline.torch_private import without_torch_function


class EngineAtWork(OfOneProcess):
    """Scope around the engine's own work in a step: one thread at a time, unseen by the guard.

    It takes a lock because backward on an accelerator runs in a thread of autograd's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._depth = 0
        self._unseen = without_torch_function()

    def __enter__(self) -> None:
        if self.is_forked:
            raise RuntimeError(FORKED)
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._unseen.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._unseen.__exit__(*exc_info)
        self._lock.release()

    def __bool__(self) -> bool:
        return self._depth > 0


class _OptimizerSteps(threading.local):
    """The optimizer steps that this thread is in, one inside of the other; they operate on the masters themselves.

    Torch tells nobody of a step that ended with an exception, so the depth is zero again when the next scope opens.
    """

    depth = 0


optimizer_steps = _OptimizerSteps()


@contextmanager
def optimizer_waits() -> Iterator[None]:
    """Have masters guarded in the block: in a closure that an optimizer calls, the model computes again."""
    depth = optimizer_steps.depth
    optimizer_steps.depth = 0
    try:
        yield
    finally:
        optimizer_steps.depth = depth
