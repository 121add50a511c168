"""The numbers of an optimizer's update, made once for each param group and step. `kernels.update` does the arithmetic.

They are computed in double precision and rounded to fp32 once, as torch's fused CPU kernels do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

ONE = np.float32(1)


class AdamRule(NamedTuple):
    """Adam and AdamW. Only one of `decay` and `penalty` does anything."""

    decay: Any  # AdamW: what the weight is multiplied by
    penalty: Any  # Adam: how much of the weight is added to the gradient; None for nothing
    first_rate: Any
    second_rate: Any
    second_decay: Any
    step_size: Any
    correction: Any
    eps: Any

    @classmethod
    def make(cls, group: dict[str, Any], step: float, decoupled: bool) -> AdamRule:
        """Return the rule of a step, counted from one."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        weight_decay = float(group["weight_decay"])
        return cls(
            np.float32(1 - lr * weight_decay) if decoupled else ONE,
            None if decoupled or weight_decay == 0 else np.float32(weight_decay),
            np.float32(1 - beta1),
            np.float32(1 - beta2),
            np.float32(beta2),
            np.float32(lr / (1 - beta1**step)),
            np.float32(math.sqrt(1 - beta2**step)),
            np.float32(group["eps"]),
        )


class SgdRule(NamedTuple):
    """SGD, with momentum if it is given a first moment."""

    lr: Any
    penalty: Any
    momentum: Any
    rate: Any
    nesterov: bool
    is_first_step: bool  # which copies the gradient

    @classmethod
    def make(cls, group: dict[str, Any], is_first_step: bool) -> SgdRule:
        """Return the rule of a step."""
        return cls(
            np.float32(group["lr"]),
            np.float32(group["weight_decay"]) if group["weight_decay"] != 0 else None,
            np.float32(group["momentum"]),
            np.float32(1 - group["dampening"]),
            bool(group["nesterov"]),
            is_first_step,
        )


class LionRule(NamedTuple):
    """Lion (arXiv 2302.06675): the sign of a momentum."""

    decay: Any
    lr: Any
    beta1: Any
    rate1: Any
    beta2: Any
    rate2: Any

    @classmethod
    def make(cls, group: dict[str, Any]) -> LionRule:
        """Return the rule of any step."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        numbers = (1 - lr * float(group["weight_decay"]), lr, beta1, 1 - beta1, beta2, 1 - beta2)
        return cls(*map(np.float32, numbers))


class Scaling(NamedTuple):
    """What is done to a gradient before the update: two factors, one after the other, and clipping by value."""

    factor: Any = ONE
    then: Any = None
    limit: Any = None
    in_bf16: Any = None  # whether each result is rounded to bf16, as of a gradient that stays in bf16; None if not


NO_SCALING = Scaling()
