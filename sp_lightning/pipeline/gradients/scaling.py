"""What is to be done to a gradient between backward and the update: unscaling and clipping.

It is noted when it is asked for, and done when the gradient is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """What happens to gradients between backward and update.

    Attributes:
        factors: What they are multiplied with, one after the other: the inverse of a loss scale, a clipping factor.
        clamp: The largest absolute value that is left.
    """

    factors: tuple[float | Tensor, ...] = ()
    clamp: float | None = None

    def without_ones(self) -> Scaling:
        """The same in fewer operations."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    def times(self, factor: float | Tensor) -> Scaling:
        """The same, and then a multiplication."""
        return Scaling((*self.factors, factor), self.clamp)

    def clamped(self, limit: float) -> Scaling:
        """The same, and then clipped by value."""
        return Scaling(self.factors, limit)

    def __bool__(self) -> bool:
        return bool(self.factors) or self.clamp is not None

    def apply_(self, gradient: Tensor) -> None:
        """Scale in place, bit by bit as `GradScaler.unscale_`, `clip_grad_norm_` and `clip_grad_value_` do."""
        for factor in self.factors:
            gradient.mul_(factor)
        if self.clamp is not None:
            gradient.clamp_(-self.clamp, self.clamp)


NO_SCALING = Scaling()
