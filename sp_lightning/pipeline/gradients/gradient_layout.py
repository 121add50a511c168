"""How gradients lie in memory that they travel through, or stay in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in
from sp_lightning.pipeline.weights.sections import Section, divide
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class GradientLayout:
    """A layout of gradients in memory: one behind the other, and then their norms, which travel with them.

    Layouts are equal, and serve as the same key, if they are of the same weights in the same dtypes.

    Attributes:
        weights: The weights that the gradients belong to.
        dtypes: The dtype of each gradient.
    """

    weights: tuple[Weight, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def in_master_dtypes(cls, weights: Iterable[Weight]) -> GradientLayout:
        """Return the layout of these weights' gradients in their masters' dtypes."""
        weights = tuple(weights)
        return cls(weights, tuple(weight.master.dtype for weight in weights))

    @property
    def is_lower(self) -> bool:
        """Whether a gradient is in another dtype than its master."""
        return any(dtype != weight.master.dtype for weight, dtype in zip(self.weights, self.dtypes, strict=True))

    @property
    def offsets(self) -> list[int]:
        """Offset of each gradient, in bytes."""
        return self._laid_out[0][:-1]

    @property
    def norms_at(self) -> int:
        """Offset of the norms, in bytes."""
        return self._laid_out[0][-1]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._laid_out[1]

    @cached_property
    def _laid_out(self) -> tuple[list[int], int]:
        sizes = [w.master.numel() * dtype.itemsize for w, dtype in zip(self.weights, self.dtypes, strict=True)]
        return lay_out([*sizes, len(sizes) * torch.float32.itemsize])

    def sections(self, nbytes: int) -> list[Section]:
        """Return the sections of the first `nbytes`."""
        return divide([weight.master for weight in self.weights], self.offsets, self.dtypes, nbytes)

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
