"""What a step of an optimizer has to do with our weights: decided once, and what it is at the moment of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.optim.of_torch import OnePass
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.optimizer.kinds import makes_state
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight


class Plan:
    """What is decided once for an optimizer, as long as its param groups have the same parameters."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        # the gradients of its weights, in the order of its parameters, with the numbers of the param groups
        self.gradients: dict[Gradient, int] = {}
        self.others: list[nn.Parameter] = []  # that are no weights of ours
        for number, param_group in enumerate(optimizer.param_groups):
            for parameter in param_group["params"]:
                weight = weights.get(id(parameter))
                if weight is None or isinstance(weight, QuantizedWeight):  # nobody trains these
                    self.others.append(parameter)
                else:
                    self.gradients[stream.of[weight]] = number
        units = {gradient.weight.unit for gradient in self.gradients}
        # the units that its weights are in, first the one that the next forward needs first
        self.units = sorted(units, key=lambda unit: (not unit.resident, unit.index))


Used: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A gradient as it lies on the host, and the optimizer's state of its weight, as it is when the step is handed over."""


@dataclass(frozen=True)
class Step:
    """A step of an optimizer."""

    optimizer: Optimizer
    plan: Plan
    settings: Sequence[dict[str, Any]]  # of each param group

    def state_of(self, gradient: Gradient) -> tuple[dict[str, Any], bool]:
        """Return the optimizer's state of a weight, and whether the step makes it."""
        master = gradient.weight.master
        state = self.optimizer.state.get(master, {})
        if state or not makes_state(self.optimizer, self.settings[self.plan.gradients[gradient]]):
            return state, False
        return self.optimizer.state.setdefault(master, state), True

    @cached_property
    def one_passes(self) -> list[OnePass]:
        """What steps weights of each param group in one pass."""
        return [OnePass(self.optimizer, settings) for settings in self.settings]
