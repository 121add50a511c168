"""How fast a drive passes optimizer state, for `sp-lightning check --speed --nvme-path FOLDER`.

It writes a file again and again, as training does, with the engine's own requests, until the rate falls and stays
there: most drives write fast into a cache, and slower when that is full. A drive that does not fall in the time that
there is may have a larger cache, and the words say so.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from sp_lightning.pipeline.optimizer.state_file import StateFile, check_folder
from sp_lightning.pipeline.optimizer.state_ring import BUFFER

_FILE = 16 << 30  # bytes of the file; less where less is free
_OF_FREE = 0.5  # the share of free space that it may take
_LIMIT, _SHORT = 240.0, 10.0  # seconds of writing at most, and of reading and of both
_WINDOW = 2.0  # seconds of which a rate is the mean
_MANY = 5  # means of this many are compared
_FALLEN, _STEADY = 0.75, 0.9  # a rate has fallen below this part of the first one; or it stays above this part
_FROM_THE_MIDDLE = 0.5  # where reads begin while the drive writes, as a part of the file


@dataclass(frozen=True)
class DriveSpeed:
    """The rates of a drive, in GB/s."""

    read: float
    write: float  # at the end
    both: float  # reads and writes at once, together
    write_at_first: float
    written: float  # GB, until `write` was measured
    is_past_cache: bool

    def __str__(self) -> str:
        writes = f"writes {self.write:.3g} GB/s"
        if self.is_past_cache:
            writes += f" after {self.written:,.0f} GB, and {self.write_at_first:.3g} GB/s before"
        else:
            writes += f", which did not fall in {self.written:,.0f} GB: with a larger cache it may still do so"
        return f"The drive reads {self.read:.3g} GB/s and {writes}; both together reach {self.both:.3g} GB/s."


class _Stream:
    """Reads or writes a file from end to end, again and again."""

    def __init__(self, file: StateFile, nbytes: int, is_read: bool, begin: float = 0.0) -> None:
        self.nbytes = 0  # that it has moved
        self._file = file
        self._is_read = is_read
        self._requests = nbytes // BUFFER
        self._next = int(begin * self._requests)
        self._memory = memoryview(mmap.mmap(-1, BUFFER))
        self._memory[:] = os.urandom(BUFFER)  # some drives compress zeros

    def window(self, seconds: float) -> float:
        """Go on for some seconds, and return the bytes per second."""
        begin, before = time.perf_counter(), self.nbytes
        while (taken := time.perf_counter() - begin) < seconds or self.nbytes == before:
            self._file.move(self._is_read, self._memory, self._next * BUFFER)
            self._next = (self._next + 1) % self._requests
            self.nbytes += BUFFER
        return (self.nbytes - before) / taken


def is_past_cache(rates: Sequence[float]) -> bool:
    """Tell from the rates of writes so far whether they have fallen, and stay where they are."""
    if len(rates) < 3 * _MANY:
        return False
    first, before, last = fmean(rates[:_MANY]), fmean(rates[-2 * _MANY : -_MANY]), fmean(rates[-_MANY:])
    return last < _FALLEN * first and _STEADY * before < last < before / _STEADY


def speed(folder: str, tell: Callable[[str], None] = print, limit: float = _LIMIT) -> DriveSpeed:
    """Measure the drive of a folder, and say how fast it is, and how to plan with that.

    Args:
        folder: A folder on the drive. The file in it has no name, and is gone at the end.
        tell: A function that gets each line.
        limit: Seconds for which the drive writes, unless its cache is full before.

    Raises:
        ValueError: The folder is on no drive, or the drive has no room.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the drive of the system is measured, too
        check_folder(folder)
    nbytes = max(BUFFER, int(min(_FILE, _OF_FREE * shutil.disk_usage(folder).free)) // BUFFER * BUFFER)
    file = StateFile(folder, nbytes)
    tell(f"Writing to the drive until its cache is full, for {limit:.0f} s at most ...")
    writes = _Stream(file, nbytes, is_read=False)
    rates: list[float] = []
    end = time.perf_counter() + limit
    while not rates or (time.perf_counter() < end and not is_past_cache(rates)):
        rates.append(writes.window(_WINDOW))
    there = min(nbytes, writes.nbytes)  # what was never written is not read from the drive
    read = _Stream(file, there, is_read=True).window(_SHORT)
    written = writes.nbytes
    reads = _Stream(file, there, is_read=True, begin=_FROM_THE_MIDDLE)
    with ThreadPoolExecutor() as threads:
        both = sum(threads.map(partial(_Stream.window, seconds=_SHORT), (reads, writes)))
    found = DriveSpeed(
        read=read / 1e9,
        write=fmean(rates[-_MANY:]) / 1e9,
        both=both / 1e9,
        write_at_first=fmean(rates[:_MANY]) / 1e9,
        written=written / 1e9,
        is_past_cache=is_past_cache(rates),
    )
    tell(str(found))
    typed = " ".join(f"--nvme-{name} {getattr(found, name):.3g}" for name in ("read", "write", "both"))
    tell(f"`sp-lightning plan MODEL {typed}` plans with the rates of this drive")
    return found
