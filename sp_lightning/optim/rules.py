"""What a pass takes: the numbers of an update, what is done to the gradient before, and how memory lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

ADAM, MOMENTUM = range(2)
ONE, ZERO, INFINITY = np.float32(1), np.float32(0), np.float32(np.inf)


class Rule(NamedTuple):
    """An update, one of these, and its numbers, of which each takes what it has.

    They are computed in double precision and rounded to fp32 once, as torch's fused CPU kernels do.
    """

    update: int
    lr: Any
    decay: Any = ONE  # what the weight is multiplied by
    penalty: Any = ZERO  # how much of the weight is added to the gradient
    first_decay: Any = ZERO
    first_rate: Any = ZERO
    second_decay: Any = ZERO
    second_rate: Any = ZERO
    correction: Any = ONE
    eps: Any = ZERO

    @classmethod
    def of(cls, update: int, **numbers: float) -> Rule:
        """Return the rule of these numbers."""
        return cls(update, **{name: np.float32(number) for name, number in numbers.items()})


class Scaling(NamedTuple):
    """What is done to a gradient before: two factors, one after the other, and clipping by value."""

    factor: Any = ONE
    then: Any = ONE
    limit: Any = INFINITY

    @property
    def operations(self) -> int:
        """How much of it there is: 0 for nothing, 1 for a factor, 2 for all."""
        if not _is_one(self.then) or self.limit != INFINITY:
            return 2
        return 0 if _is_one(self.factor) else 1


def _is_one(factor: Any) -> bool:
    return isinstance(factor, np.float32) and bool(factor == 1)  # a tensor on a device would be waited for


NO_SCALING = Scaling()


class Memory(NamedTuple):
    """What a pass over a weight reads and writes: tensors, or their addresses."""

    weight: Any
    low: Any  # the lower half of the master, whose upper half the weight is
    gradient: Any
    first: Any
    second: Any
    copy: Any  # in bf16, to be written
    first_scale: Any = None  # of moments in codes
    second_scale: Any = None


class Kind(NamedTuple):
    """What a kernel is compiled for. Of memory it is the bytes of an element, 0 if there is none."""

    update: int
    is_penalized: bool
    operations: int  # of the scaling
    weight: int
    low: int
    gradient: int
    first: int
    second: int
    copy: int


class Update(Protocol):
    """What an optimizer does to a weight, by the options of its param group."""

    def moments(self, group: dict[str, Any]) -> list[str]:
        """Return the names of the moments that a weight has."""

    def rule(self, group: dict[str, Any], step: float) -> Rule:
        """Return the numbers of a step, as kernels take them; steps are counted from one."""

    def step(
        self, group: dict[str, Any], step: float, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor]
    ) -> None:
        """Make a step in place, on the device of these tensors, by torch's own code."""


class Pass(NamedTuple):
    """The update of a weight, or of a range of one, whose tensors all lie alike in memory."""

    update: Update
    group: dict[str, Any]
    step: float
    memory: Memory
    scaling: Scaling = NO_SCALING
    begin: int = 0  # the first element of the range, a multiple of `BLOCK`

    @property
    def seed(self) -> int:
        """What rounds moments in codes at random: another number for each step, and the same when it is resumed."""
        return int(self.step) * 0x9E3779B1 & 0x7FFFFFFF


def kind_of(rule: Rule, memory: Memory, scaling: Scaling) -> Kind:
    """Return what kernel makes a step of this rule."""
    widths = [0 if tensor is None else tensor.itemsize for tensor in memory[:6]]
    return Kind(rule.update, bool(rule.penalty != 0), scaling.operations, *widths)
