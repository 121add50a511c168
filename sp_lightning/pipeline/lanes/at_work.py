"""Scopes of the engine's own work, of one thread at a time, and of optimizers' steps. None of them works in a fork.

The guard of weights lets both pass. [Note: one thread, one stream] in pipeline/__init__.py has why one thread computes.

[Note: forks]
A forked process, such as a loader's worker, has only the thread that forked it, and locks that our threads held at that
moment. Code that waits there for one of our threads would wait forever. So the process can read a weight whose value is
there, and gets an error for all else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from sp_lightning.pipeline.torch_private import without_torch_function

FORKED = (
    "This process was forked from the one in which superpipeline streams the model. It has neither the "
    "threads nor the GPU of that process. It can only read weights of a model that trains on the CPU, unless "
    "an optimizer was updating them. Give it a copy from before the fork, such as `copy.deepcopy(module)`, "
    "or start it with 'spawn'."
)


class OfOneProcess:
    """An object that does nothing in a fork of the process that made it."""

    is_forked = False  # whether this is such a fork

    def __init__(self) -> None:
        _of_this_process.add(self)

    def note_fork(self) -> None:
        """Note, in the fork, that this is one."""
        self.is_forked = True


_of_this_process: WeakSet[OfOneProcess] = WeakSet()


def _note_fork() -> None:
    for made_before in _of_this_process:
        made_before.note_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_note_fork)


class EngineAtWork(OfOneProcess):
    """Scope around the engine's own work in a step: one thread at a time, unseen by the guard.

    It takes a lock because other threads may read weights, or drop the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._depth = 0
        self._without_guard = without_torch_function()
        # The thread that computes with the model, and the one whose backward or optimizer step is under way.
        self.computing_thread: int | None = None
        self.continuing_thread: int | None = None

    def __enter__(self) -> None:
        if self.is_forked:
            raise RuntimeError(FORKED)
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._without_guard.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if self._depth == 1:
            self._without_guard.__exit__(*exc_info)
        self._depth -= 1
        self._lock.release()

    def abandon(self) -> None:
        """Leave the scopes of this thread that an interrupt has kept from being left."""
        if self._lock.acquire(blocking=False):  # otherwise another thread is at work
            while self._depth:
                self.__exit__(None, None, None)
            self._lock.release()

    def __bool__(self) -> bool:
        return self._depth > 0

    def refuse_others(self) -> None:
        """Raise if another thread computes with the model."""
        threads_at_work = {self.computing_thread, self.continuing_thread}
        if threads_at_work - {None, threading.get_ident()}:
            raise RuntimeError(
                "A thread computes with a model, or steps its optimizer, while another thread "
                "computes with it. Only the weights that one of them needs next are on the GPU. "
                "Let the threads take turns with a shared `threading.Lock`, or give one of them "
                "a copy, such as `copy.deepcopy(module)`."
            )


class _OptimizerSteps(threading.local):
    """The nested optimizer steps that this thread is in; these operate on the masters themselves."""

    depth = 0


optimizer_steps = _OptimizerSteps()


@contextmanager
def optimizer_waits() -> Iterator[None]:
    """Guard masters in the block: the model computes again in a closure that an optimizer calls.

    Afterwards the depth is restored, also if a step in the block has ended with an exception.
    """
    depth = optimizer_steps.depth
    optimizer_steps.depth = 0
    try:
        yield
    finally:
        optimizer_steps.depth = depth


def use_threads(count: int | None) -> None:
    """Let this many threads share each of torch's operations in the calling thread; None for as many as elsewhere."""
    if count is not None:
        usual_count = torch.get_num_threads()
        torch.set_num_threads(count)
        # This sets the count of this thread, and the default of later ones, which another thread restores.
        restoring_thread = threading.Thread(target=torch.set_num_threads, args=(usual_count,))
        restoring_thread.start()
        restoring_thread.join()
