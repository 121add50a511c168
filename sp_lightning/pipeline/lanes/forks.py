"""What a fork of the process has not: our threads, and locks that these hold at that moment.

A forked process, as a loader's worker is one, has the thread that forked it and no other. Whatever waits there for one
of ours would wait forever. So it reads a weight whose value is there, and gets an error for all else.
"""

from __future__ import annotations

import os
from weakref import WeakSet

FORKED = (
    "This process was forked from the one in which superpipeline streams the model, and has "
    "neither its threads nor its device: it can read weights that are streamed on the CPU, unless "
    "they were being stepped, and do nothing else with the model. Give it a copy that is made "
    "before, such as `copy.deepcopy(module)`, or start it with 'spawn'."
)


class OfOneProcess:
    """What does nothing in a fork of the process that it was made in."""

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


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_fork)
