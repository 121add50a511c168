"""Adding up the gradients of a weight on the host."""

from __future__ import annotations

from torch import Tensor

_CHUNK = 1 << 18  # elements cast and added at once: they stay in the cache in between


def add_up(target: Tensor, before: Tensor | None, arrived: Tensor) -> None:
    """Write the sum of two gradients, the first of which may be there already, to where it stays."""
    if before is None:
        target.copy_(arrived)
        return
    if before is not target:
        target.copy_(before)
    if target.dtype == arrived.dtype or target.stride() != arrived.stride():
        target.add_(arrived)
        return
    count = arrived.numel()
    flat_target, flat_arrived = target.as_strided((count,), (1,)), arrived.as_strided((count,), (1,))
    for start in range(0, count, _CHUNK):  # pieces that stay in the cache between the cast and the addition
        end = min(start + _CHUNK, count)
        flat_target[start:end].add_(flat_arrived[start:end].to(target.dtype))
