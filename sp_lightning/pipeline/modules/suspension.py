"""Optimizers that step now: what they do with masters they mean, so guards (guard.py) let them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_stepping: list[tuple[int, FrameType]] = []  # thread and frame of the optimizer steps that are running


def suspend_guards(step: FrameType) -> None:
    """An optimizer steps, in this frame: what it does with masters it means."""
    _stepping.append((threading.get_ident(), step))


def resume_guards() -> None:
    """The optimizer of the last `suspend_guards` has stepped."""
    if _stepping:
        _stepping.pop()


def guards_suspended() -> bool:
    """Whether an optimizer steps now, in this thread."""
    forget_ended_steps()
    return bool(_stepping) and _stepping[-1][0] == threading.get_ident()


def forget_ended_steps() -> None:
    """Torch does not tell when a step ends with an exception; its frame would hold the closure, and so the batch."""
    thread = threading.get_ident()
    while _stepping and _stepping[-1][0] == thread and not _is_running(_stepping[-1][1]):
        _stepping.pop()


def _is_running(wanted: FrameType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


def resume_all_guards() -> None:
    """After an exception: no optimizer steps any more."""
    _stepping.clear()


@contextmanager
def guards_resumed() -> Iterator[None]:
    """A closure that an optimizer calls computes again: there masters are guarded as ever."""
    forget_ended_steps()
    stepping, _stepping[:] = list(_stepping), []
    try:
        yield
    finally:
        _stepping[:] = stepping
