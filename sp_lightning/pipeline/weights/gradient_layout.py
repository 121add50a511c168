"""How the gradients of weights that lie together lie in memory, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight

STAGING_BUFFERS = 2  # one is filled while the other leaves
MEASURED = {torch.float32, torch.bfloat16}  # dtypes of masters whose gradients bring their norms


class GradientLayout:
    """A layout of gradients in memory: one behind the other, and then their norms, which travel with them.

    Attributes:
        norms_at: Offset of the norms, in bytes.
        nbytes: Bytes in all.
    """

    def __init__(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes = list(dtypes)
        self._like = [weight.host for weight in weights]
        sizes = [w.layout.numel() * dtype.itemsize for w, dtype in zip(weights, dtypes, strict=True)]
        offsets, self.nbytes = lay_out([*sizes, len(sizes) * torch.float32.itemsize])
        *self._offsets, self.norms_at = offsets
        # the dtype in which torch would compute norms, that of the masters; None if it is not one that norms travel in
        masters = {weight.dtype for weight in weights}
        self.norm_dtype = masters.pop() if len(masters) == 1 and masters <= MEASURED else None

    def views(self, memory: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return bytes of `memory` as the gradients, and as their norms."""
        lying = zip(self._offsets, self._like, self.dtypes, strict=True)
        norms = torch.empty(len(self.dtypes), device="meta")
        gradients = [tensor_in(memory, offset, like, dtype) for offset, like, dtype in lying]
        return gradients, tensor_in(memory, self.norms_at, norms, torch.float32)


def gradient_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of the gradients of a unit's weights, as they are sent to the host, with their norms."""
    trained = [weight for weight in weights if weight.master.requires_grad]
    return GradientLayout(trained, [weight.gradient_dtype for weight in trained]).nbytes
