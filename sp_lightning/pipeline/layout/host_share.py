"""How much host memory weights and gradients take, and how much of it may be pinned (page-locked)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from sp_lightning.pipeline.gradients.buffers import gradient_bytes
from sp_lightning.pipeline.host_memory import available_host_memory, total_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.units import Unit

_PINNED_SHARE = 0.8  # of the host's memory, so that the rest of the system does not starve


class HostShare:
    """The share of the host's memory that an arrangement takes.

    Attributes:
        pin: Whether to pin weights.
        pin_gradients: Whether to pin gradients.
        pinnable: Bytes that may be pinned besides weights and gradients; None if there is no limit.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend, pin_memory: bool | str, processes: int) -> None:
        self._processes = processes
        self._weights = [weight for unit in units for weight in unit.weights]
        self._gradient_bytes = sum(map(gradient_bytes, units))
        weight_bytes = sum(weight.compute_bytes for weight in self._weights)
        both, total = weight_bytes + self._gradient_bytes, total_host_memory()
        may_pin = backend.can_pin and pin_memory is not False
        self.pin = self.pin_gradients = may_pin
        self.pinnable = None if may_pin else 0
        if may_pin and pin_memory is not True and total:
            limit = int(_PINNED_SHARE * total) // processes
            self.pin, self.pin_gradients = weight_bytes <= limit, both <= limit
            self.pinnable = limit - self.pin * weight_bytes - self.pin_gradients * self._gradient_bytes
            if not self.pin_gradients:
                warnings.warn(
                    f"Pinning {readable_bytes(weight_bytes)} of weights and {readable_bytes(self._gradient_bytes)} of "
                    f"gradients would page-lock more than {_PINNED_SHARE:.0%} of the host's {readable_bytes(total)}. "
                    f"{'Gradients' if self.pin else 'Both'} are left as they are, which makes copies slow. "
                    "`pin_memory=True` page-locks everything.",
                    stacklevel=2,
                )

    def check(self, moving: int, at_once: int) -> None:
        """Refuse an arrangement that does not fit.

        Args:
            moving: Bytes that exist twice for a moment, while weights are laid out.
            at_once: How many processes take their share at this moment.

        Raises:
            ValueError: If host memory does not suffice.
        """
        free = available_host_memory()
        gradients = [weight.master.grad for weight in self._weights if weight.master.grad is not None]
        present = sum(gradient.nbytes for gradient in gradients if gradient.layout is torch.strided)
        coming = max(0, self._gradient_bytes - present)
        needed = coming + sum(weight.compute_bytes for weight in self._weights if weight.lowered) + moving
        if free is not None and needed * at_once > free:
            each = f" in each of {at_once} processes" if at_once > 1 else ""
            raise ValueError(
                f"Host memory is too small: {readable_bytes(needed)} are needed on top of the model{each} "
                f"({readable_bytes(coming)} for gradients, the rest for copies of weights; optimizer state is not "
                f"counted), and {readable_bytes(free)} are free. Use a machine with more memory, or freeze weights"
                f"{', or train on fewer devices (`Trainer(devices=1)`)' if self._processes > 1 else ''}."
            )
