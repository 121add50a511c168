"""Unscaling and clipping of gradients, between backward and the optimizer's update.

They are recorded when they are asked for, and applied when a gradient is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Operations on a gradient between backward and the update."""

    # factors to multiply by, one after the other: the inverse of a loss scale, a clipping factor
    factors: tuple[float | Tensor, ...] = ()
    clamp: float | None = None  # the largest absolute value to leave after that; None not to clip by value

    def without_ones(self) -> Scaling:
        """Return the same scaling without factors of one."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    def times(self, factor: float | Tensor) -> Scaling:
        """Return this scaling with one more factor."""
        return Scaling((*self.factors, factor), self.clamp)

    def clamped(self, limit: float) -> Scaling:
        """Return this scaling with clipping by value after it."""
        return Scaling(self.factors, limit)

    def __bool__(self) -> bool:
        return bool(self.factors) or self.clamp is not None

    def apply_(self, gradient: Tensor) -> None:
        """Scale in place, bit for bit as `GradScaler.unscale_`, `clip_grad_norm_` and `clip_grad_value_` do."""
        for factor in self.factors:
            gradient.mul_(factor)
        if self.clamp is not None:
            gradient.clamp_(-self.clamp, self.clamp)


NO_SCALING = Scaling()
