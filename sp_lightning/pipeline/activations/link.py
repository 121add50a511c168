"""The speed of copies, and the cost of offloading that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from sp_lightning.pipeline.lanes.backend import Backend
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
