"""How much host memory weights and gradients take, and how much of it may be pinned (page-locked)."""

from __future__ import annotations

import sys
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
    """

    def __init__(self, units: Sequence[Unit], backend: Backend, pin_memory: bool | str, processes: int) -> None:
        self._processes = processes
        weights = [weight for unit in units for weight in unit.weights]
        self._weight_bytes = sum(weight.compute_bytes for weight in weights)
        self._copy_bytes = sum(weight.compute_bytes for weight in weights if weight.lowered)
        self._gradient_bytes = sum(map(gradient_bytes, units))
        gradients = [weight.master.grad for weight in weights if weight.master.grad is not None]
        present = sum(gradient.nbytes for gradient in gradients if gradient.layout is torch.strided)
        self._new_gradient_bytes = max(0, self._gradient_bytes - present)
        self._total = total_host_memory() or 0
        self._may_pin = backend.can_pin and pin_memory is not False
        has_limit = pin_memory is not True and self._total
        self._limit = int(_PINNED_SHARE * self._total) // processes if has_limit else sys.maxsize
        self.pin = self._may_pin and self._weight_bytes <= self._limit
        self.pin_gradients = self._may_pin and self._weight_bytes + self._gradient_bytes <= self._limit

    def check(self, moving: int, at_once: int) -> None:
        """Refuse an arrangement that does not fit, and warn if not all of it can be pinned.

        Args:
            moving: Bytes that exist twice for a moment, while weights are laid out.
            at_once: How many processes take their share at this moment.

        Raises:
            ValueError: If host memory does not suffice.
        """
        free = available_host_memory()
        needed = self._new_gradient_bytes + self._copy_bytes + moving
        if free is not None and needed * at_once > free:
            each = f" in each of {at_once} processes" if at_once > 1 else ""
            raise ValueError(
                f"Host memory is too small: {readable_bytes(needed)} are needed on top of the model{each} "
                f"({readable_bytes(self._new_gradient_bytes)} for gradients, the rest for copies of weights; optimizer "
                f"state is not counted), and {readable_bytes(free)} are free. Use a machine with more memory, or "
                f"freeze weights{', or train on fewer devices (`Trainer(devices=1)`)' if self._processes > 1 else ''}."
            )
        if self._may_pin and not self.pin_gradients:
            warnings.warn(
                f"Pinning {readable_bytes(self._weight_bytes)} of weights and {readable_bytes(self._gradient_bytes)} "
                f"of gradients would page-lock more than {_PINNED_SHARE:.0%} of the host's "
                f"{readable_bytes(self._total)}. {'Gradients' if self.pin else 'Both'} are left as "
                "they are, which makes copies slow. `pin_memory=True` page-locks everything.",
                stacklevel=2,
            )

    def pinnable_bytes(self) -> int | None:
        """Return how many bytes may be pinned besides weights and gradients; None if there is no limit."""
        if not self._may_pin:
            return 0
        if self._limit == sys.maxsize:
            return None
        taken = self.pin * self._weight_bytes + self.pin_gradients * self._gradient_bytes
        return max(0, self._limit - taken)
