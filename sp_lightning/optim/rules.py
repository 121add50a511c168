"""The arguments of a pass: the update and its numbers, the scaling of the gradient before it, and the memory."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from sp_lightning.optim.layout import ParamGroup

ONE = np.float32(1)


class Rule(NamedTuple):
    """The numbers of a step, as kernels take them.

    They are computed in double precision and rounded to fp32 once, as torch's fused CPU kernels do.
    """

    lr: Any
    decay: Any  # a factor of the weight
    penalty: Any  # the part of the weight that is added to the gradient
    first_rate: Any
    second_decay: Any
    second_rate: Any
    correction: Any
    eps: Any


@dataclass(frozen=True)
class Update:
    """Adam, by the options of a param group; its weight decay is added to the gradient unless it is decoupled."""

    is_decoupled: bool
    moments: ClassVar[int] = 2

    def rule(self, group: ParamGroup, step: float) -> Rule:
        """Return the numbers of a step; steps are counted from one."""
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        exact = Rule(
            lr=lr / (1 - beta1**step),
            decay=1 - lr * weight_decay if self.is_decoupled else 1,
            penalty=0 if self.is_decoupled else weight_decay,
            first_rate=1 - beta1,
            second_decay=beta2,
            second_rate=1 - beta2,
            correction=math.sqrt(1 - beta2**step),
            eps=group["eps"],
        )
        return Rule(*map(np.float32, exact))

    def by_torch(self, group: ParamGroup, step: float, weight: Tensor, gradient: Tensor, *moments: Tensor) -> None:
        """Make a step in place by torch's fused kernel for the device of these tensors."""
        first, second = moments
        beta1, beta2 = map(float, group["betas"])
        steps_before = torch.full((), step - 1, dtype=torch.float32, device=weight.device)
        adam(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [steps_before],
            fused=True,
            decoupled_weight_decay=self.is_decoupled,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


@dataclass(frozen=True)
class SignUpdate(Update):
    """Lion: every weight moves by the learning rate, in the direction of a mean of gradient and moment."""

    moments: ClassVar[int] = 1

    def rule(self, group: ParamGroup, step: float) -> Rule:
        """Return the numbers of a step."""
        lr, beta1 = np.float32(float(group["lr"])), np.float32(float(group["betas"][0]))
        # neither of them is corrected
        return super().rule(group, step)._replace(lr=lr, correction=beta1)

    def by_torch(self, group: ParamGroup, step: float, weight: Tensor, gradient: Tensor, *moments: Tensor) -> None:
        """Make a step in place by torch's operations, each of which rounds once, as the kernel does."""
        (first,) = moments
        rule = self.rule(group, step)
        direction = (first * rule.correction).add_(gradient * rule.first_rate).sign_()
        weight.mul_(rule.decay).sub_(direction.mul_(rule.lr))
        first.mul_(rule.second_decay).add_(gradient * rule.second_rate)


class Scaling(NamedTuple):
    """The scaling of a gradient before the update: two factors, one after the other."""

    factor: Any = ONE
    then: Any = ONE


NO_SCALING = Scaling()


class Memory(NamedTuple):
    """The memory that a pass over a weight reads and writes: tensors, or their addresses."""

    weight: Any
    low: Any  # the lower half of the master, whose upper half the weight is
    gradient: Any
    first: Any
    second: Any  # None if there is one moment
    copy: Any  # a copy of the new weight, to be written
    first_scale: Any = None  # the scales of moments in codes
    second_scale: Any = None


class Kind(NamedTuple):
    """The properties that a kernel is compiled for. Memory counts by the bytes of an element, 0 if there is none."""

    is_penalized: bool
    is_scaled: bool
    is_coded: bool
    weight: int
    low: int
    gradient: int
    first: int
    second: int  # without it, the kernel is Lion's
    copy: int

    @classmethod
    def of(cls, rule: Rule, scaling: Scaling, memory: Memory) -> Kind:
        """Return the kind of the kernel that makes a step."""
        flags = bool(rule.penalty != 0), scaling != NO_SCALING, memory.first_scale is not None
        return cls(*flags, *(0 if tensor is None else tensor.itemsize for tensor in memory[:6]))


class Pass(NamedTuple):
    """The update of a weight, or of a range of one, whose tensors all lie alike in memory."""

    update: Update
    group: ParamGroup
    step: float
    memory: Memory
    scaling: Scaling = NO_SCALING
    begin: int = 0  # the first element of the range, a multiple of `BLOCK`

    @property
    def seed(self) -> int:
        """The seed for rounding moments in codes: another number for each step, and the same in a resumed run."""
        return zlib.crc32(b"%d" % self.step)
