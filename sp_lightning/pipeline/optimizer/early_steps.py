"""Stepping units while backward runs, as soon as all gradients of a group have landed.

A scope around the backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
A group is stepped only if no node of the graph holds one of its weights on the device any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.gradients.stream import Shipment
from sp_lightning.pipeline.gradients.unit_gradients import State, UnitGradients
from sp_lightning.pipeline.optimizer.group_steps import GroupSteps, Plan
from sp_lightning.pipeline.optimizer.kinds import keeps_state
from sp_lightning.pipeline.weights.units import Group


class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called; takes gradients as they arrive.

    Attributes:
        optimizer: The optimizer.
        keeps_gradients: Whether gradients are kept after the step.
        stepped: The units that have taken the step.
    """

    def __init__(
        self, optimizer: Optimizer, plan: Plan, steps: GroupSteps, clamp: float | None, keeps_gradients: bool
    ) -> None:
        self.optimizer = optimizer
        self.keeps_gradients = keeps_gradients
        self.plan = plan
        self.stepped: list[UnitGradients] = []
        self._steps = steps
        self._scaling = Scaling(clamp=clamp)
        # as they are when the first unit is stepped, not when the scope began: hooks before backward may change them
        self._settings: list[dict[str, Any]] | None = None
        self._shipments: list[Shipment] = []

    def wants(self, unit: UnitGradients) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""
        group = unit.unit.group
        if group.resident or group not in self.plan.steps:
            return False
        if any(gradient.weight.master.requires_grad for gradient in self.plan.strangers[group]):
            return False
        groups, state = self.optimizer.param_groups, self.optimizer.state
        for step in self.plan.steps[group]:
            makes_state = keeps_state(self.optimizer, groups[step.param_group])
            for gradient in step.gradients:
                weight = gradient.weight
                if weight.lowered_leaves:
                    return False
                if makes_state and weight.master.requires_grad and not state.get(weight.master):
                    return False
        return True

    def take(self, shipment: Shipment) -> None:
        """Step the unit's group when its last gradients have landed; if it is still needed, when backward leaves it."""
        group = shipment.unit.unit.group
        if self._shipments and self._shipments[0].unit.unit.group is not group:
            self.end_of_backward()  # backward has moved on, and there are few landing buffers
        self._shipments.append(shipment)
        if group.handles or self._left_of(group):
            return
        # an inner checkpoint holds frozen weights without a handle, and may read them after the others had gradients
        if all(weight.master.requires_grad for weight in group.weights):
            self._step(group)

    def _step(self, group: Group) -> None:
        shipments, self._shipments = self._shipments, []
        if self._settings is None:
            self._settings = self._steps.settings(self.optimizer)
        arrived = {g: tensor for s in shipments for g, tensor in zip(s.gradients, s.arrived, strict=True)}
        jobs = self._steps.jobs(self.optimizer, self.plan.steps[group], self._settings, arrived, self._scaling)
        for unit in [s.unit for s in shipments]:
            unit.state = State.CONSUMED
            self.stepped.append(unit)
        for gradient, tensor in arrived.items():
            if not self.keeps_gradients:
                gradient.forget()
            elif tensor.dtype != gradient.weight.dtype:  # others are clipped in place
                gradient.scaling = self._scaling
        self._steps.begin(group, jobs, [s.ticket for s in shipments], [s.buffer for s in shipments])
        self._steps.stats.steps_in_backward += group.unit_count

    def _left_of(self, group: Group) -> int:
        """Return how many weights of a group have yet to get their gradients."""
        if group.unit_count == 1:
            return 0
        trained = sum(weight.master.requires_grad for weight in group.weights)
        return trained - sum(len(shipment.gradients) for shipment in self._shipments)

    def end_of_backward(self) -> None:
        """Step the group whose gradients arrived last, as backward has left it, or give them back if it is needed."""
        group = self._shipments[0].unit.unit.group if self._shipments else None
        if group is not None and not group.handles and not self._left_of(group):
            self._step(group)
        shipments, self._shipments = self._shipments, []
        for shipment in shipments:
            self._steps.stream.take_back(shipment)

    def check_settings(self) -> None:
        """Check, when `step()` is called, that the settings are those that units were stepped with.

        Raises:
            RuntimeError: They were changed in between.
        """
        if self._settings is None or _equal(self._settings, self._steps.settings(self.optimizer)):
            return
        raise RuntimeError(
            f"{type(self.optimizer).__name__} has stepped units in backward, and its param groups were changed after "
            "that, before `step()`. Set learning rates and the like before backward or after the step, or train with "
            "`overlap_optimizer=False`."
        )


def _equal(left: Any, right: Any) -> bool:
    """Tell whether two settings, which may contain tensors, are equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left is right or bool(left == right)
