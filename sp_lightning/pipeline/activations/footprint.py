"""The device memory that calls of a unit take for backward, the ways to have their activations there, their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from sp_lightning.pipeline.activations.offload import MIN_OFFLOAD_BYTES
from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.weights.buffers import HostBuffer

_HIDDEN_COST = 0.1  # the part of its time that a copy costs even if computing hides it
_PROBE_BYTES = 16 << 20


class Link(NamedTuple):
    """The speed of copies, in bytes per second.

    Attributes:
        up: To the device.
        down: To the host.
    """

    up: float
    down: float

    def offload_seconds(self, nbytes: int, weights: int, forward: float, backward: float) -> float:
        """Return what it costs, in seconds, to have a unit's activations wait on the host.

        Args:
            nbytes: Bytes of the activations.
            weights: Bytes of weights that travel for the unit.
            forward: Seconds of its forward, which hides the activations' way out.
            backward: Seconds of its backward, which hides the way back of weights and activations.
        """
        sending = max(0.0, nbytes / self.down - forward)
        waiting_anyway = max(0.0, weights / self.up - backward)
        fetching = max(0.0, (weights + nbytes) / self.up - backward) - waiting_anyway
        return sending + fetching + _HIDDEN_COST * nbytes * (1 / self.up + 1 / self.down)

    @staticmethod
    def measured(backend: Backend, pin: bool) -> Link:
        """Measure the link by small copies in both directions; the host waits for them.

        Args:
            backend: Copies.
            pin: Whether to pin host memory for it, as that for activations is: the rates are others if it is not.
        """
        free = backend.free_memory()
        nbytes = _PROBE_BYTES if free is None else min(_PROBE_BYTES, max(1, free // 4))
        device = backend.allocate(nbytes)
        host = HostBuffer(nbytes, backend, pin)

        def rate(copy: Callable[[], Any]) -> float:
            backend.synchronize(copy())
            begin = perf_counter()
            backend.synchronize(copy())
            return nbytes / (perf_counter() - begin)

        try:
            return Link(
                up=rate(lambda: backend.upload(device, host.bytes)),
                down=rate(lambda: backend.download(host.bytes, device)),
            )
        finally:
            host.release()


class Footprint(NamedTuple):
    """Device memory that calls of a unit take, in bytes.

    Attributes:
        held: Inputs that were not held already.
        saved: Tensors that the forwards saved, beyond the inputs.
        large: How much of `held` and `saved` is in pieces that are worth a copy to the host.
        working: The most that a single call took.
        repeatable: Whether the forwards can run again, and doing so saves memory.
        large_inputs: How much of `held` is in pieces that are worth a copy to the host.
    """

    held: int
    saved: int
    large: int
    working: int
    repeatable: bool
    large_inputs: int = 0

    def combined_with(self, other: Footprint) -> Footprint:
        """Return the footprint of these calls and others together, between the same forward and backward."""
        return Footprint(
            self.held + other.held,
            self.saved + other.saved,
            self.large + other.large,
            max(self.working, other.working),
            self.repeatable and other.repeatable,
            self.large_inputs + other.large_inputs,
        )

    def ways(self, link: Link | None, weights: int, forward: float, backward: float) -> list[Way]:
        """Return the ways that are open to the unit: what they take, and what they cost.

        Args:
            link: The speed of copies; None if nothing can be offloaded.
            weights: Bytes of weights that travel for the unit.
            forward: Seconds of its forwards.
            backward: Seconds of its backwards.
        """
        everything, working = self.held + self.saved, self.working
        ways = [Way("keep", everything, working, 0.0)]
        if self.repeatable:
            ways.append(Way("recompute", self.held, working, forward, repeating=forward))
        if link is not None and self.large:
            size = self.large
            seconds = link.offload_seconds(size, weights, forward, backward)
            ways.append(Way("offload", everything - size, working, seconds, leaving=size, under_way=size))
        if link is not None and self.large_inputs and self.repeatable:
            size = self.large_inputs
            seconds = forward + link.offload_seconds(size, weights, forward, forward + backward)
            held = self.held - size
            ways.append(Way("recompute_offload", held, working, seconds, size, under_way=size, repeating=forward))
        return ways


def bytes_worth_a_copy(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory under these tensors that is in pieces which are worth a copy to the host."""
    dense = [tensor for tensor in tensors if storage_key(tensor)]  # a sparse tensor has no storage
    by_memory = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in dense}
    return sum(nbytes for nbytes in by_memory.values() if nbytes >= MIN_OFFLOAD_BYTES)
