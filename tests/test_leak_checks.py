"""What the tests themselves stand on: the wait for what a test leaves behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from .conftest import collect_until


class Node:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_thread_leaves_to_a_cycle_is_freed() -> None:
    """A thread that holds a cycle while garbage is collected for the first time. One collection only freed nothing."""
    node = Node()
    alive = weakref.ref(node)
    collected = threading.Event()

    def hold(held: list[Node]) -> None:
        collected.wait()
        held.clear()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collected.set()

    holder = threading.Thread(target=hold, args=([node],))
    holder.start()
    del node
    gc.disable()  # or it might run by itself
    gc.callbacks.append(note)
    try:
        collect_until(lambda: alive() is None)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        collected.set()
        holder.join()
    assert alive() is None


def test_what_is_held_for_good_is_told() -> None:
    """The wait ends, and the check after it fails."""
    node = Node()
    alive = weakref.ref(node)
    start = time.monotonic()
    collect_until(lambda: alive() is None, seconds=0.1)
    assert alive() is node
    assert time.monotonic() - start < 60
