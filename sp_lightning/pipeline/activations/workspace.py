"""What operations take on the device beside what is held for backward: a softmax over all logits, most of all.

Nothing that autograd saves shows it, but the device's allocator does. Looked at in steps that are measured (auto.py),
so that what is chosen for activations leaves room for it.
"""

from __future__ import annotations

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.transfer.backend import Backend


class Workspace:
    """Measured between `begin` and `end`, from a forward to the end of its backward.

    What is allocated at most and what is held at most need not be there at the same time. At the turn from forward to
    backward they are, for what comes before it; what a unit's backward takes is known otherwise.

    Args:
        backend: Tells what is allocated.
        meter: Counts what is held for backward.

    Attributes:
        bytes: The most so far; 0 where the device does not tell.
    """

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self.bytes = 0
        self._backend = backend
        self._meter = meter
        self._elsewhere: int | None = None  # what is allocated whatever is computed, while something is measured
        self._turned = False

    def begin(self) -> None:
        """Measure from here on."""
        in_use = self._backend.memory_in_use()
        self._elsewhere = None if in_use is None else in_use - self._meter.bytes
        self._turned = False

    def turn(self) -> None:
        """Backward has come to the first unit, or to another one."""
        if not self._turned:
            self._turned = True
            self._look()

    def end(self) -> None:
        """Measure no more."""
        self._look()
        self._elsewhere = None

    def _look(self) -> None:
        if self._elsewhere is None:
            return
        most = self._backend.most_memory_in_use()
        assert most is not None
        self.bytes = max(self.bytes, most - self._elsewhere - self._meter.step_peak)
