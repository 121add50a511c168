"""Long work shows itself, once it has taken five seconds: weights are arranged, saved, loaded.

Whoever works says how far it has come. Here, that is a line in the log for each tenth, as the engine knows of no
terminal; a Trainer's strategy shows its kind of progress bar (trainer/progress.py).
"""

from __future__ import annotations

import logging
import time

from sp_lightning.pipeline.stats import readable_bytes

SHOWN_AFTER = 5.0  # seconds

_LOG = logging.getLogger(__name__)


class Work:
    """Work that is under way: a scope, in which it shows how far it has come if it takes long.

    Args:
        words: What is done, as the beginning of a line.
        nbytes: How much there is to do.
    """

    def __init__(self, words: str, nbytes: int) -> None:
        self.words = f"{words} ({readable_bytes(nbytes)})"
        self._nbytes = nbytes
        self._done = 0
        self._begin = time.monotonic()
        self._percent = 0  # that was shown last

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, nbytes: int) -> None:
        """Note that so much more is done."""
        self._done += nbytes
        percent = min(100, 100 * self._done // max(1, self._nbytes))
        if percent > self._percent and time.monotonic() - self._begin >= SHOWN_AFTER:
            self.show(self._percent, percent)
            self._percent = percent

    def show(self, before: int, percent: int) -> None:
        """Show that so many percent are done, and not as many as before."""
        if percent // 10 > before // 10:
            self.say(f"{self.words}: {percent} %")

    def say(self, line: str) -> None:
        """Put a line into the log."""
        _LOG.info(line)

    def close(self) -> None:
        """Show it no longer: it is done, or has ended with an exception."""


class Progress:
    """Begins work that shows itself: here, in the log."""

    def begin(self, words: str, nbytes: int) -> Work:
        """Return work to be done in its scope."""
        return Work(words, nbytes)
