"""The memory that operations take on the device besides what is held for backward: most of all, a softmax over logits.

Nothing that autograd saves shows it, but the device's allocator does. It is looked at in steps that are measured
(auto.py), so that the policies chosen for activations leave room for it.

The peaks of allocated and of held memory need not come at the same time: a loss takes its memory when no unit is at
work. So a step is looked at in stretches: each is a unit's forward or backward, and the loss is one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.lanes.backend import Backend


class Workspace:
    """Measures the workspace between `begin` and `end`, from a forward to the end of its backward.

    Args:
        backend: Tells how much device memory is allocated.
        meter: Counts what is held for backward.

    Attributes:
        is_known: Whether the device tells what is allocated, and a step has been measured.
    """

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self.is_known = False
        self._backend = backend
        self._meter = meter
        self._baseline: int | None = None  # what is allocated whatever is computed; None while nothing is measured

    @property
    def is_measuring(self) -> bool:
        """Whether a step is being measured."""
        return self._baseline is not None

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Start measuring before a unit's call.

        Args:
            inputs: What the unit is given. It is allocated, and counts as held as soon as the call has begun.
        """
        in_use = self._backend.reset_peak_memory()
        keys = [self._meter.add(tensor) for tensor in inputs]
        self._baseline = None if in_use is None else in_use - self._meter.bytes
        self.is_known = in_use is not None
        for key in keys:
            self._meter.remove(key)

    def end_stretch(self) -> int:
        """End a stretch, and begin another; return the workspace that it took, or 0 while nothing is measured."""
        taken = 0
        if self._baseline is not None:
            most = self._backend.peak_since_reset()
            assert most is not None
            taken = max(0, most - self._baseline - self._meter.stretch_peak)
            self._backend.reset_peak_memory()
        self._meter.begin_stretch()
        return taken

    def end(self) -> None:
        """Stop measuring."""
        self._baseline = None
