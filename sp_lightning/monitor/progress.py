"""A progress bar for set-up: hundreds of gigabytes may be read, moved and pinned before the first step."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

_PATIENCE = 2.0  # seconds without a bar


class SetUpProgress:
    """Shows a progress bar if set-up takes long."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are done; zero starts over."""
        if not done:
            self.close()
            words = "Superpipeline: weights into place"
            self._bar = tqdm(
                total=total, desc=words, unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=_PATIENCE
            )
        elif self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        """Remove the bar, even if it is not complete."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
