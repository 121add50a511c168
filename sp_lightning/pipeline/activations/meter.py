"""A count of the device memory that is held because autograd saved it for backward, and that operations take besides.

Memory is counted once, however many tensors lie in it. Weights and buffers do not count, as they would be there anyway.
Counting costs the host some microseconds for each saved tensor, so under `"auto"` only steps that are measured do it.

[Note: operations]
A softmax over logits is in no graph, but the device's allocator knows of it. The peaks of allocated and of held memory
need not come at the same time: a loss takes its memory when no unit is at work. So a step is looked at in stretches:
each is a unit's forward or backward, and the loss is one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key


class Stretch(NamedTuple):
    """What a stretch of a step took at most."""

    before: int  # bytes that were held when it began
    saved: int  # bytes that were held, beyond those held when it began
    operations: int  # bytes that operations took besides; 0 if the device does not tell, or if nobody measures


class Meter:
    """Counts into `stats.activation_bytes` and `stats.activation_peak_bytes`.

    Called for every tensor that is saved, and from whichever thread frees it; threads that compute take turns.
    """

    def __init__(self, backend: Backend, stats: Stats, always: bool = True) -> None:
        self.always = always  # whether to count in all steps, from the next one on
        self.counts = always  # whether it counts now
        self.uncounted: set[int] = set()  # the identities of buffers, and of weights that live on the device
        self._peak_before = self._peak = self._held_before = 0
        self._backend = backend
        self._stats = stats
        self._held: dict[int, list[int]] = {}  # bytes, and the number of tensors in them
        self._baseline: int | None = None  # what is allocated whatever is computed; None while nobody asks

    @property
    def bytes(self) -> int:
        """Bytes that are held now."""
        return self._stats.activation_bytes

    @property
    def step_peak(self) -> int:
        """The most bytes that were held since the step began."""
        return max(self._peak_before, self._peak)

    def begin_step(self) -> None:
        """Begin a step, whose peaks are its own, and which nobody measures yet."""
        self.counts, self._baseline = self.always, None
        self._peak_before = 0
        self._held_before = self._peak = self._stats.activation_bytes

    def measure(self, inputs: Iterable[Tensor]) -> None:
        """Count in this step, and find out what operations take, before a unit's call with these inputs."""
        self.counts = True
        memory = self._backend.count_peak_anew()
        if memory is not None:
            keys = [self.add(tensor) for tensor in inputs]  # allocated, and held as soon as the call has begun
            self._baseline = memory.allocated - self.bytes
            for key in keys:
                self.remove(key)

    def end_stretch(self) -> Stretch:
        """End a stretch, and begin another."""
        taken = 0
        if self._baseline is not None and (memory := self._backend.count_peak_anew()) is not None:
            taken = max(0, memory.peak - self._baseline - self._peak)
        stretch = Stretch(self._held_before, self._peak - self._held_before, taken)
        self._peak_before = self.step_peak
        self._held_before = self._peak = self.bytes
        return stretch

    def add(self, tensor: Tensor) -> int:
        """Count a tensor that is held from now on; return the key for `remove`."""
        key = storage_key(tensor) if self.counts else 0
        held = self._held.get(key)
        if held is None:
            is_counted = tensor.device == self._backend.device and not isinstance(tensor, nn.Parameter)
            if not key or key in self.uncounted or not is_counted:
                return 0
            held, stats = [tensor.untyped_storage().nbytes(), 0], self._stats
            self._held[key] = held
            stats.activation_bytes += held[0]
            stats.activation_peak_bytes = max(stats.activation_peak_bytes, stats.activation_bytes)
            self._peak = max(self._peak, stats.activation_bytes)
        held[1] += 1
        return key

    def remove(self, key: int) -> None:
        """Stop counting a tensor that is no longer held."""
        if key:
            held = self._held[key]
            held[1] -= 1
            if not held[1]:
                del self._held[key]
                self._stats.activation_bytes -= held[0]
