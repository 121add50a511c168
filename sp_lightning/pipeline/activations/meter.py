"""How much memory of the device is held because autograd saved it for backward.

Memory is counted once, however many tensors lie in it. Weights and buffers do not count: they would be there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sp_lightning.pipeline._private import storage_key
from sp_lightning.pipeline.stats import Stats


class Meter:
    """Counts into `stats.activation_bytes` and `stats.activation_peak_bytes`.

    Called for every tensor that is saved, and from whichever thread frees it. Between reading a number and writing it
    nothing is called, so no other thread comes between.

    Args:
        device: Whose memory.
        stats: Counters.

    Attributes:
        uncounted: Memory, by its identity, that is not held by what is saved: buffers, weights that live on the device.
    """

    def __init__(self, device: torch.device, stats: Stats) -> None:
        self.uncounted: set[int] = set()
        self._peak_before = self._recent_peak = self._held_before = 0
        self._device = device
        self._stats = stats
        self._held: dict[int, _Held] = {}

    @property
    def bytes(self) -> int:
        """What is held now."""
        return self._stats.activation_bytes

    @property
    def step_peak(self) -> int:
        """The most that was held since the step began."""
        return max(self._peak_before, self._recent_peak)

    @property
    def stretch_peak(self) -> int:
        """The most that was held in this stretch of the step."""
        return self._recent_peak

    @property
    def added(self) -> int:
        """The most that was held in this stretch of the step, beyond what was held when it began."""
        return self._recent_peak - self._held_before

    def begin_step(self) -> None:
        """From here on peaks are another step's."""
        self._peak_before = 0
        self._held_before = self._recent_peak = self.bytes

    def begin_stretch(self) -> None:
        """Another stretch of the step begins: a unit's call has ended, or backward has come to a unit."""
        self._peak_before = self.step_peak
        self._held_before = self._recent_peak = self.bytes

    def add(self, tensor: Tensor) -> int:
        """Count a tensor that is held from now on; the result is for `remove`."""
        key = storage_key(tensor)
        held = self._held.get(key)
        if held is None:
            if not key or key in self.uncounted or tensor.device != self._device or isinstance(tensor, nn.Parameter):
                return 0
            held = self._held[key] = _Held(tensor.untyped_storage().nbytes())
            stats = self._stats
            stats.activation_bytes += held.nbytes
            if stats.activation_bytes > self._recent_peak:
                self._recent_peak = stats.activation_bytes
            if stats.activation_bytes > stats.activation_peak_bytes:
                stats.activation_peak_bytes = stats.activation_bytes
        held.tensors += 1
        return key

    def remove(self, key: int) -> None:
        """A tensor that was counted is not held any longer."""
        if key:
            held = self._held[key]
            held.tensors -= 1
            if not held.tensors:
                del self._held[key]
                self._stats.activation_bytes -= held.nbytes


class _Held:
    __slots__ = ("nbytes", "tensors")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensors = 0
