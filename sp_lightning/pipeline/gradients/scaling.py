"""What is done to a gradient between backward and the update: unscaling and clipping, applied as it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Operations on a gradient between backward and the update."""

    # factors to multiply by, one after the other: the inverse of a loss scale, a clipping factor
    factors: tuple[float | Tensor, ...] = ()
    # the largest absolute value to leave after that; None not to clip by value
    clamp: float | None = None

    @cached_property
    def without_ones(self) -> Scaling:
        """The same scaling without factors of one, when they are known; looked at once, as many gradients share it."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    def times(self, factor: float | Tensor) -> Scaling:
        """Return this scaling with one more factor."""
        return Scaling((*self.factors, factor), self.clamp)

    def apply_(self, gradient: Tensor) -> None:
        """Scale in place, bit for bit as `GradScaler.unscale_`, `clip_grad_norm_` and `clip_grad_value_` do."""
        for factor in self.factors:
            gradient.mul_(factor)
        if self.clamp is not None:
            gradient.clamp_(-self.clamp, self.clamp)


NO_SCALING = Scaling()
