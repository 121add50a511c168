"""Figures for people: counters of the engine's work, the progress of long work, and bytes in readable units.

Long work shows its progress once it has taken five seconds: weights are arranged, saved, loaded. In a terminal this is
a bar. Elsewhere each tenth is a line: here in the log, and under a Trainer among its messages (trainer/narrator.py).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, fields

SHOWN_AFTER = 5.0  # seconds

_LOG = logging.getLogger(__name__)


@dataclass
class Stats:
    """Counts since the pipeline was attached or `clear` was called."""

    steps: int = 0  # outermost `step()` scopes
    loads: int = 0  # units copied to the GPU, resident weights not counted
    # loads that had not been prefetched, so that computing waited for the whole copy
    misses: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    offloaded_bytes: int = 0  # the part of `bytes_to_host` that was saved activations
    fetched_bytes: int = 0  # the part of `bytes_to_device` that was saved activations coming back
    # activations that backward needed before they had been fetched ahead
    activation_misses: int = 0
    # loads of units that backward needed without having announced them; they count in `misses`, too
    heals: int = 0
    write_backs: int = 0  # weights copied back to the host because a forward changed them in place
    recomputed: int = 0  # unit calls whose forward ran again in backward
    host_syncs: int = 0  # times that the host waited for the device
    activation_bytes: int = 0  # device memory that saved tensors hold now, weights not counted
    activation_peak_bytes: int = 0  # the maximum of `activation_bytes`
    # times that the host waited for an optimizer's step because a weight was accessed
    optimizer_waits: int = 0
    overlapped_steps: int = 0  # units that an optimizer stepped while the device could compute
    visits: int = 0  # the part of `overlapped_steps` that was made on the device
    bytes_to_drive: int = 0  # optimizer state that was written to a drive, and read from it before
    # Units whose gradients have waited on the device for their step on the host.
    late_gradients: int = 0
    # The part of `overlapped_steps` that was made before backward had ended.
    steps_in_backward: int = 0
    optimizer_steps: int = 0  # calls of an optimizer's `step`
    arrangements: int = 0  # times that weights were given places on host and device
    resets: int = 0  # recoveries after an exception in the middle of a step

    def clear(self) -> None:
        """Set every counter to zero, and the activation peak to the current `activation_bytes`."""
        held = self.activation_bytes
        for field in fields(self):
            setattr(self, field.name, 0)
        self.activation_bytes = self.activation_peak_bytes = held


def readable_bytes(size: float) -> str:
    """Format a number of bytes, with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_BAR_WIDTH = 30


class Progress:
    """Begins work that shows its progress: as a bar in a terminal, and elsewhere, by default, in the log."""

    @property
    def draws_bar(self) -> bool:
        """Whether a bar is drawn in place of lines."""
        return sys.stderr.isatty()

    def show(self, words: str, percent: int) -> None:
        """Show how far work has come."""
        if not self.draws_bar:
            self.say(f"{words}: {percent} %")
            return
        done = "#" * (_BAR_WIDTH * percent // 100)
        end = "\n" if percent == 100 else ""
        print(f"\r{words}: [{done:<{_BAR_WIDTH}}] {percent:3} %", end=end, file=sys.stderr, flush=True)

    def begin(self, words: str, nbytes: int) -> Work:
        """Return work to be done."""
        return Work(words, nbytes, self)

    def say(self, line: str) -> None:
        """Show a line to the user."""
        _LOG.info(line)


class Work:
    """Work that is under way, which shows its progress if it takes long.

    Args:
        words: A name for the work, which begins each line.
        nbytes: The bytes to be processed.
        progress: Shows how far the work has come.
    """

    def __init__(self, words: str, nbytes: int, progress: Progress) -> None:
        self._words = f"{words} ({readable_bytes(nbytes)})"
        self._nbytes = nbytes
        self._progress = progress
        self._done = 0
        self._begin = time.monotonic()
        self._shown = 0  # percent that were shown, or tenths of all

    def advance(self, nbytes: int) -> None:
        """Note that this many more bytes are done."""
        self._done += nbytes
        percent = min(100, 100 * self._done // max(1, self._nbytes))
        part = percent // (1 if self._progress.draws_bar else 10)
        if part > self._shown and time.monotonic() - self._begin >= SHOWN_AFTER:
            self._shown = part
            self._progress.show(self._words, percent)
