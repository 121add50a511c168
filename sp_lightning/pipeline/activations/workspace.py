"""What operations take on the device beside what is held for backward: a softmax over all logits, most of all.

Nothing that autograd saves shows it, but the device's allocator does. Looked at in steps that are measured (auto.py),
so that what is chosen for activations leaves room for it.

What is allocated at most and what is held at most need not be there at the same time: a loss takes its memory when no
unit is at work. So a step is looked at in stretches, a unit's forward or backward each, and the loss is one of its own.
"""

from __future__ import annotations

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.transfer.backend import Backend


class Workspace:
    """Measured between `begin` and `end`, from a forward to the end of its backward.

    Args:
        backend: Tells what is allocated.
        meter: Counts what is held for backward.

    Attributes:
        is_known: Whether the device tells, and a step was looked at.
    """

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self.is_known = False
        self._backend = backend
        self._meter = meter
        self._elsewhere: int | None = None  # what is allocated whatever is computed, while something is measured

    @property
    def is_measured(self) -> bool:
        """Whether it is looked at now."""
        return self._elsewhere is not None

    def begin(self) -> None:
        """Measure from here on."""
        in_use = self._backend.memory_in_use()
        self._elsewhere = None if in_use is None else in_use - self._meter.bytes
        self.is_known = in_use is not None

    def end_stretch(self) -> int:
        """What was taken in the stretch that ends here, another one begins; 0 while nothing is measured."""
        taken = 0
        if self._elsewhere is not None:
            most = self._backend.most_memory_in_use()
            assert most is not None
            taken = max(0, most - self._elsewhere - self._meter.stretch_peak)
            self._backend.memory_in_use()  # the most is counted anew
        self._meter.begin_stretch()
        return taken

    def end(self) -> None:
        """Measure no more."""
        self._elsewhere = None
