"""How gradients lie in memory that they travel through, or stay in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class GradientLayout:
    """A layout of gradients in memory: one behind the other, and then their norms, which travel with them.

    Attributes:
        norms_at: Offset of the norms, in bytes.
        nbytes: Bytes in all.
        is_lower: Whether a gradient is in another dtype than its master.
        can_be_measured: Whether all masters are in fp32, so that norms computed in fp32 have torch's bits.
    """

    def __init__(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> None:
        self.weights = tuple(weights)
        self.dtypes = tuple(dtypes)
        sizes = [w.layout.numel() * dtype.itemsize for w, dtype in zip(self.weights, self.dtypes, strict=True)]
        offsets, self.nbytes = lay_out([*sizes, len(sizes) * torch.float32.itemsize])
        *self.offsets, self.norms_at = offsets
        self.is_lower = any(dtype != w.dtype for w, dtype in zip(self.weights, self.dtypes, strict=True))
        self.can_be_measured = all(weight.dtype == torch.float32 for weight in self.weights)

    @classmethod
    def in_master_dtypes(cls, weights: Iterable[Weight]) -> GradientLayout:
        """Return the layout of these weights' gradients in their masters' dtypes."""
        weights = tuple(weights)
        return cls(weights, [weight.dtype for weight in weights])

    def tensors_in(self, memory: Tensor) -> list[Tensor]:
        """Return bytes of `memory` as the gradients."""
        lying = zip(self.weights, self.dtypes, self.offsets, strict=True)
        return [tensor_in(memory, offset, weight.host, dtype) for weight, dtype, offset in lying]

    def norms_in(self, memory: Tensor) -> Tensor:
        """Return bytes of `memory` as the norms."""
        like = torch.empty(len(self.weights), device="meta")
        return tensor_in(memory, self.norms_at, like, torch.float32)

    def flat_in(self, memory: Tensor) -> list[Tensor]:
        """Return the gradients, and the padding between them, as one flat tensor for each stretch of one dtype."""
        pairs = zip(self.dtypes, self.offsets, strict=True)
        starts = [next(run)[1] for _, run in groupby(pairs, key=lambda pair: pair[0])]
        runs = zip((dtype for dtype, _ in groupby(self.dtypes)), starts, [*starts[1:], self.norms_at], strict=True)
        return [memory[start:end].view(dtype) for dtype, start, end in runs if start < end]


def gradient_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's gradients, as they are sent to the host, with their norms."""
    weights = [weight for weight in unit.weights if weight.master.requires_grad]
    return GradientLayout(weights, [weight.gradient_dtype for weight in weights]).nbytes
