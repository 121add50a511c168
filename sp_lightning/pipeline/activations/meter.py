"""A count of the device memory that is held because autograd saved it for backward.

Memory is counted once, however many tensors lie in it. Weights and buffers do not count, as they would be there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key


class Meter:
    """Counts into `stats.activation_bytes` and `stats.activation_peak_bytes`.

    Called for every tensor that is saved, and from whichever thread frees it; threads that compute take turns.

    Args:
        device: The device whose memory is counted.
        stats: Counters.

    Attributes:
        uncounted: Memory, by its identity, that is there whatever is saved: buffers, and weights that live on the
            device.
    """

    def __init__(self, device: torch.device, stats: Stats) -> None:
        self.uncounted: set[int] = set()
        self._peak_before = self._recent_peak = self._held_before = 0
        self._device = device
        self._stats = stats
        self._held: dict[int, _Held] = {}

    @property
    def bytes(self) -> int:
        """Bytes that are held now."""
        return self._stats.activation_bytes

    @property
    def step_peak(self) -> int:
        """The most bytes that were held since the step began."""
        return max(self._peak_before, self._recent_peak)

    @property
    def stretch_peak(self) -> int:
        """The most bytes that were held in this stretch of the step."""
        return self._recent_peak

    @property
    def added(self) -> int:
        """The most bytes that were held in this stretch of the step, beyond those held when it began."""
        return self._recent_peak - self._held_before

    def begin_step(self) -> None:
        """Begin a step, whose peaks are its own."""
        self._peak_before = 0
        self._held_before = self._recent_peak = self.bytes

    def begin_stretch(self) -> None:
        """Begin another stretch of the step: a unit's call has ended, or backward has reached a unit."""
        self._peak_before = self.step_peak
        self._held_before = self._recent_peak = self.bytes

    def add(self, tensor: Tensor) -> int:
        """Count a tensor that is held from now on; return the key for `remove`."""
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
        """Stop counting a tensor that is no longer held."""
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
