"""A progress bar for set-up: hundreds of gigabytes may be read, moved and pinned before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

_LEAST_BYTES = 1 << 30
_PATIENCE = 2.0  # seconds without a bar


class SetUpProgress:
    """Shows a progress bar if set-up takes long.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = 0.0
        self._bar: Any = None

    @property
    def shown(self) -> bool:
        """Whether a bar is on the screen."""
        return self._bar is not None

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are done; zero starts over."""
        if not done:
            self.close()
            self._begin = self._clock()
        if self._bar is None and total >= _LEAST_BYTES and self._clock() - self._begin >= _PATIENCE and done < total:
            self._bar = tqdm(
                total=total, desc="Superpipeline: weights into place", unit="B", unit_scale=True, unit_divisor=1024
            )
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        """Remove the bar, even if it is not complete."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
