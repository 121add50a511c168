"""Suspension of guards (guard.py) while an optimizer steps, because it operates on the masters themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Stepping(threading.local):
    """The optimizer steps that are running in this thread, by their frames."""

    def __init__(self) -> None:
        self.frames: list[FrameType] = []


_stepping = _Stepping()


def suspend_guards(step: FrameType) -> None:
    """Suspend guards for the optimizer step that runs in this frame."""
    _stepping.frames.append(step)


def resume_guards() -> None:
    """Undo the last `suspend_guards`, because its optimizer has stepped."""
    if _stepping.frames:
        _stepping.frames.pop()


def guards_suspended() -> bool:
    """Tell whether an optimizer is stepping now, in this thread."""
    forget_ended_steps()
    return bool(_stepping.frames)


def forget_ended_steps() -> None:
    """Forget steps that ended with an exception: torch does not tell us, and their frames would hold closures."""
    while _stepping.frames and not _is_running(_stepping.frames[-1]):
        _stepping.frames.pop()


def _is_running(wanted: FrameType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


def resume_all_guards() -> None:
    """Resume guards after an exception, when no optimizer is stepping any more."""
    _stepping.frames.clear()


@contextmanager
def guards_resumed() -> Iterator[None]:
    """Resume guards for the duration of the block: in a closure that an optimizer calls, the model computes again."""
    forget_ended_steps()
    suspended, _stepping.frames = _stepping.frames, []
    try:
        yield
    finally:
        _stepping.frames = suspended
