"""The device memory that calls of a unit take for backward, and the ways to have their activations there.

`auto` compares it with the room that there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from sp_lightning.pipeline.activations.link import Link
from sp_lightning.pipeline.activations.offload import MIN_OFFLOAD_BYTES, negligible
from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.torch_private import storage_key


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
        if link is not None:
            size = self.large
            seconds = link.offload_seconds(size, weights, forward, backward)
            ways.append(Way("offload", everything - size, working, seconds, leaving=size, under_way=size))
        if link is not None and self.repeatable:
            size = self.large_inputs
            seconds = forward + link.offload_seconds(size, weights, forward, forward + backward)
            held = self.held - size
            ways.append(Way("recompute_offload", held, working, seconds, size, under_way=size, repeating=forward))
        return ways


def bytes_worth_a_copy(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory under these tensors that is in pieces which are worth a copy to the host."""
    dense = [tensor for tensor in tensors if storage_key(tensor)]  # a sparse tensor has no storage
    by_memory = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in dense}
    sizes = sorted(nbytes for nbytes in by_memory.values() if nbytes >= MIN_OFFLOAD_BYTES)
    return sum(sizes[negligible(sizes) :])
