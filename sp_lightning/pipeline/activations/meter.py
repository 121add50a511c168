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

from torch import Tensor, nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key


class Meter:
    """Counts into `stats.activation_bytes` and `stats.activation_peak_bytes`.

    Called for every tensor that is saved, and from whichever thread frees it; threads that compute take turns.

    Attributes:
        always: Whether to count in all steps, from the next one on.
        counts: Whether it counts now.
        uncounted: Memory, by its identity, that is there whatever is saved: buffers, and weights that live on the
            device.
        knows_operations: Whether the device tells what is allocated, and a step has been measured.
    """

    def __init__(self, backend: Backend, stats: Stats, always: bool = True) -> None:
        self.counts = self.always = always
        self.uncounted: set[int] = set()
        self.knows_operations = False
        self._peak_before = self._recent_peak = self._held_before = 0
        self._backend = backend
        self._stats = stats
        self._held: dict[int, _Held] = {}
        self._baseline: int | None = None  # what is allocated whatever is computed; None while nobody asks

    @property
    def bytes(self) -> int:
        """Bytes that are held now."""
        return self._stats.activation_bytes

    @property
    def step_peak(self) -> int:
        """The most bytes that were held since the step began."""
        return max(self._peak_before, self._recent_peak)

    @property
    def added(self) -> int:
        """The most bytes that were held in this stretch of the step, beyond those held when it began."""
        return self._recent_peak - self._held_before

    def begin_step(self) -> None:
        """Begin a step, whose peaks are its own, and which nobody measures yet."""
        self.counts, self._baseline = self.always, None
        self._peak_before = 0
        self._held_before = self._recent_peak = self.bytes

    def measure(self, inputs: Iterable[Tensor], operations: bool) -> None:
        """Count in this step, before a unit's call.

        Args:
            inputs: What the unit is given. It is allocated, and counts as held as soon as the call has begun.
            operations: Whether to find out what operations take.
        """
        self.counts = True
        in_use = self._backend.reset_peak_memory() if operations else None
        if in_use is not None:
            self.knows_operations = True
            keys = [self.add(tensor) for tensor in inputs]
            self._baseline = in_use - self.bytes
            for key in keys:
                self.remove(key)

    def end_stretch(self) -> int:
        """End a stretch, and begin another; return what operations took in it, or 0 if nobody knows."""
        taken = 0
        if self._baseline is not None:
            taken = max(0, (self._backend.peak_since_reset() or 0) - self._baseline - self._recent_peak)
            self._backend.reset_peak_memory()
        self._peak_before = self.step_peak
        self._held_before = self._recent_peak = self.bytes
        return taken

    def add(self, tensor: Tensor) -> int:
        """Count a tensor that is held from now on; return the key for `remove`."""
        key = storage_key(tensor) if self.counts else 0
        held = self._held.get(key)
        if held is None:
            is_counted = tensor.device == self._backend.device and not isinstance(tensor, nn.Parameter)
            if not key or key in self.uncounted or not is_counted:
                return 0
            held = self._held[key] = _Held(tensor.untyped_storage().nbytes())
            stats = self._stats
            stats.activation_bytes += held.nbytes
            self._recent_peak = max(self._recent_peak, stats.activation_bytes)
            stats.activation_peak_bytes = max(stats.activation_peak_bytes, stats.activation_bytes)
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
