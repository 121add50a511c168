"""How fast copies are, and so what it costs to have activations wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.host import HostBuffer

_HIDDEN = 0.1  # how much of its time a copy costs that hides behind computing
_PROBE_BYTES = 16 << 20


class Link(NamedTuple):
    """How fast copies are, in bytes per second."""

    up: float
    down: float

    def offload_seconds(self, nbytes: int, weights: int, forward: float, backward: float) -> float:
        """What it costs to have activations of a unit wait on the host.

        Args:
            nbytes: Their bytes.
            weights: Bytes of weights that travel for the unit.
            forward: Seconds of its forward, under which activations leave.
            backward: Seconds of its backward, under which weights and activations come.
        """
        sending = max(0.0, nbytes / self.down - forward)
        waiting_anyway = max(0.0, weights / self.up - backward)
        fetching = max(0.0, (weights + nbytes) / self.up - backward) - waiting_anyway
        return sending + fetching + _HIDDEN * nbytes * (1 / self.up + 1 / self.down)

    @staticmethod
    def measured(backend: Backend) -> Link:
        """Copy a little in both directions; the host waits."""
        free = backend.free_memory()
        nbytes = _PROBE_BYTES if free is None else min(_PROBE_BYTES, max(1, free // 4))
        device = backend.allocate(nbytes)
        host = HostBuffer(nbytes, backend, backend.can_pin)

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
