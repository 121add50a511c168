"""What a second forward saves, in place of what the first one has saved, and whether it is the same."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.saved import Kept, Recording
from sp_lightning.pipeline.torch_private import storage_key

_SAMPLED = 1024  # values of each saved tensor that are compared, or nearly twice as many
_TOLERANCE = 1e-2  # of them: kernels that add in another order each time compute the same all the same


class NothingMissing(Exception):
    """Ends a second forward once all dropped tensors have been recomputed."""


class Refill:
    """Fills the gaps that dropped tensors have left with those that a second forward saves."""

    def __init__(self, first: Recording) -> None:
        self._kept = iter(first.kept)
        self.missing = sum(kept is not None and kept.tensor is None for kept in first.alive())

    def pack(self, tensor: Tensor) -> Tensor:
        """Take what the forward saves, in order."""
        reference = next(self._kept, None)
        kept: Kept | None = None if reference is None else reference()
        tensor = tensor.detach()  # or the second graph would keep itself alive (see `Kept`)
        if kept is not None and kept.tensor is None and kept.fill(tensor):
            self.missing -= 1
            if not self.missing:
                raise NothingMissing
        return tensor


def sample(recording: Recording, weights: Container[int]) -> dict[int, Tensor]:
    """Return some values of each saved tensor, by its number.

    Args:
        recording: What was saved.
        weights: Memory that may have left the device.
    """
    samples = {}
    for number, kept in enumerate(recording.alive()):
        tensor = None if kept is None else kept.tensor
        # bytes are a kernel's workspace (LSTM), parts of which are uninitialized
        if tensor is None or tensor.layout is not torch.strided or tensor.dtype is torch.uint8:
            continue
        if storage_key(tensor) not in weights:
            values = tensor.detach().flatten()
            samples[number] = values[:: max(1, values.numel() // _SAMPLED)].clone()
    return samples


def are_close(before: dict[int, Tensor], after: dict[int, Tensor]) -> bool:
    """Compare samples of two forwards; the host waits for it."""
    return all(_is_close(before[number], values) for number, values in after.items() if number in before)


def _is_close(before: Tensor, after: Tensor) -> bool:
    if torch.equal(before, after):
        return True
    before, after = before.to(torch.complex128), after.to(torch.complex128)
    scale = before.abs().nan_to_num(0, 0, 0).mean().item()
    return torch.allclose(before, after, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)
