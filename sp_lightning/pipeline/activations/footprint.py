"""The device memory that calls of a unit take for backward, as `auto` compares it with the room that there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from sp_lightning.pipeline._private import storage_key
from sp_lightning.pipeline.activations.offload import MIN_OFFLOAD_BYTES, negligible


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


def bytes_worth_a_copy(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory under these tensors that is in pieces which are worth a copy to the host."""
    dense = [tensor for tensor in tensors if storage_key(tensor)]  # a sparse tensor has no storage
    by_memory = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in dense}
    sizes = sorted(nbytes for nbytes in by_memory.values() if nbytes >= MIN_OFFLOAD_BYTES)
    return sum(sizes[negligible(sizes) :])
