"""What weights and gradients take of the host's memory, and how much of that may be page-locked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from sp_lightning.pipeline.gradients.landing import lay_out_gradients
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.host import available_host_memory, total_host_memory
from sp_lightning.pipeline.weights.units import Unit

_PINNED_SHARE = 0.8  # of the host's memory; the rest of the system must not starve


class HostShare:
    """The share of the host's memory that an arrangement takes.

    Args:
        units: All units.
        backend: Page-locks, if it can.
        pin_memory: The user's choice.
        processes: How many on this machine arrange the same.

    Attributes:
        pin: Whether to page-lock weights.
        pin_gradients: Whether to page-lock gradients.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend, pin_memory: bool | str, processes: int) -> None:
        self._processes = processes
        weights = [weight for unit in units for weight in unit.weights]
        self._weights = sum(weight.compute_bytes for weight in weights)
        self._copies = sum(weight.compute_bytes for weight in weights if weight.lowered)
        trainable = ([weight for weight in unit.weights if weight.master.requires_grad] for unit in units)
        self._gradients = sum(lay_out_gradients(own, [w.master.dtype for w in own]).nbytes for own in trainable)
        self._total = total_host_memory()
        self._may_pin = backend.can_pin and pin_memory is not False
        has_limit = self._may_pin and pin_memory is not True and self._total is not None
        self._limit = int(_PINNED_SHARE * (self._total or 0)) // processes if has_limit else None
        self.pin = self._may_pin and self._is_within_limit(self._weights)
        self.pin_gradients = self._may_pin and self._is_within_limit(self._weights + self._gradients)

    def check(self, moving: int, at_once: int) -> None:
        """Refuse what does not fit, and say it if not everything can be page-locked.

        Args:
            moving: Bytes that are there twice while weights are laid out.
            at_once: How many processes take theirs at this moment.

        Raises:
            ValueError: If there is less.
        """
        free = available_host_memory()
        needed = self._gradients + self._copies + moving
        if free is not None and needed * at_once > free:
            each = f" in each of {at_once} processes" if at_once > 1 else ""
            raise ValueError(
                f"Host memory is too small: {readable_bytes(needed)} are needed on top of the model{each} "
                f"({readable_bytes(self._gradients)} for gradients, the rest for copies of weights; optimizer state is "
                f"not counted), and {readable_bytes(free)} are free. Use a machine with more memory, or freeze weights"
                f"{', or train on fewer devices (`Trainer(devices=1)`)' if self._processes > 1 else ''}."
            )
        if self._may_pin and not self.pin_gradients:
            warnings.warn(
                f"{readable_bytes(self._weights)} of weights and {readable_bytes(self._gradients)} of gradients would "
                f"page-lock more than {_PINNED_SHARE:.0%} of the host's {readable_bytes(self._total or 0)}. "
                f"{'Gradients' if self.pin else 'Both'} go through a small page-locked ring instead, which is slower. "
                "`pin_memory=True` page-locks everything.",
                stacklevel=2,
            )

    def pinnable_bytes(self) -> int | None:
        """How much may be page-locked besides weights and gradients; None for any amount."""
        if not self._may_pin:
            return 0
        if self._limit is None:
            return None
        taken = self.pin * self._weights + self.pin_gradients * self._gradients
        return max(0, self._limit - taken)

    def _is_within_limit(self, nbytes: int) -> bool:
        return self._limit is None or nbytes <= self._limit
