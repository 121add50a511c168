"""Steps in backward: units are stepped before the optimizer's `step()` is called, as soon as gradients have landed.

A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.routes import Shipment
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, Scaling, SegmentGradients
from sp_lightning.pipeline.optimizer.kinds import makes_state, settings_of
from sp_lightning.pipeline.optimizer.plan import Plan, Step, Used
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.units.unit import Unit


class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called, with gradients as they come.

    A unit is stepped only if no node of the graph holds one of its weights on the device any more.

    Attributes:
        plan: What is decided for the optimizer.
        keeps_gradients: Whether gradients are kept after the step.
        stepped: The gradients that the step has used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        steps: UnitSteps,
        clamp: float | None,
        keeps_gradients: bool,
    ) -> None:
        self.optimizer = optimizer
        self.keeps_gradients = keeps_gradients
        self.plan = plan
        self.stepped: list[SegmentGradients] = []
        self._steps = steps
        self._scaling = Scaling(clamp=clamp)
        # as they are when the first unit is stepped, not when the scope began: hooks before backward may change them
        self._settings: list[dict[str, Any]] | None = None
        self._shipments: list[Shipment] = []  # of one unit, until all that it waits for are there
        # the gradients of weights whose state this step makes, in this process
        self._new: list[Gradient] = []
        for gradient, number in plan.gradients.items():
            master = gradient.weight.master
            is_followed = gradient.weight.unit.is_followed
            if is_followed or not master.requires_grad or optimizer.state.get(master):
                continue
            if makes_state(optimizer, optimizer.param_groups[number]):
                self._new.append(gradient)
                optimizer.state[master] = {}  # it stands in the order in which torch would make it

    # ------------------------------------------------------------------------------------------------- in backward

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether these gradients, which are complete, should go to the optimizer right away."""
        unit = of_segment.unit
        if unit.resident or unit.apart:  # the latter would have to wait for the step
            return False
        return all(gradient in self.plan.gradients for gradient in of_segment.trained)

    def receive(self, shipment: Shipment) -> None:
        """Step the unit when its last gradients have landed; if it is still needed, when backward leaves it."""
        unit = shipment.of_segment.unit
        if self._shipments and self._shipments[0].of_segment.unit is not unit:
            self.end_unit()  # backward has moved on, and there are few landing buffers
        self._shipments.append(shipment)
        # an inner checkpoint holds frozen weights without a handle, and may read them after the others had gradients
        if self._is_complete(unit) and all(weight.master.requires_grad for weight in unit.weights):
            self._step(unit)

    def end_unit(self) -> None:
        """Step the unit whose gradients came last, as backward has left it, or give them back if it is needed."""
        if not self._shipments:
            return
        unit = self._shipments[0].of_segment.unit
        if self._is_complete(unit):
            self._step(unit)
            return
        for shipment in self._shipments:
            self._steps.stream.take_back(shipment)
        self._shipments = []

    def _is_complete(self, unit: Unit) -> bool:
        """Tell whether all trained weights of a unit have their gradients, and no node holds a weight any more."""
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        arrived = sum(len(shipment.gradients) for shipment in self._shipments)
        return not unit.handles and arrived == trained

    def _step(self, unit: Unit) -> None:
        steps = self._steps
        shipments = self._shipments
        self._shipments = []
        if self._settings is None:
            self._settings = settings_of(self.optimizer, steps.fused)
        used: dict[Gradient, Used] = {}
        unit_awaits_others = False
        copies = steps.window.copies_of([unit])
        for shipment in shipments:
            for gradient, tensor in zip(shipment.gradients, shipment.tensors, strict=True):
                gradient.scaling = self._scaling
                used[gradient] = tensor, self.optimizer.state.get(gradient.weight.master, {})
            unit_awaits_others |= steps.stream.exchange.pass_on(shipment.of_segment, copies)
        if unit.is_followed:
            steps.count(unit, self.plan)
        else:
            buffers = [shipment.buffer for shipment in shipments if shipment.buffer is not None]
            steps.step(unit, Step(self.optimizer, self.plan, self._settings), used, buffers)
            if unit.visit is not None:
                unit.visit.begin()
        unit.is_ahead = unit_awaits_others
        if not unit_awaits_others and not used.keys().isdisjoint(self._new):
            # how state is made depends on torch's default dtype, which may change
            steps.finish([unit])
        for shipment in shipments:
            shipment.of_segment.consume()
            self.stepped.append(shipment.of_segment)
            if not self.keeps_gradients:
                steps.stream.exchange.drop(shipment.gradients)
        steps.window.stats.steps_in_backward += 1

    # -------------------------------------------------------------------------------------------------- after backward

    def acknowledge(self) -> None:
        """Take the units that were stepped for what they are: the optimizer's `step()` was called."""
        if self._new:  # other processes, which backward could not wait for, have ended theirs
            self._steps.finish([of_segment.unit for of_segment in self.stepped])
        for of_segment in self.stepped:
            of_segment.unit.is_ahead = False
            of_segment.acknowledge_step(self.keeps_gradients)
        for gradient in self._new:
            if not self.optimizer.state.get(gradient.weight.master):
                self.optimizer.state.pop(gradient.weight.master, None)  # it got no gradient

    def abandon(self) -> None:
        """Give up after an error: `step()` will not be called. Warn if not all weights have been stepped."""
        for unit in self.plan.units:
            self._steps.count(unit, self.plan)
        self.acknowledge()
        trained = sum(gradient.weight.master.requires_grad for gradient in self.plan.gradients)
        stepped = sum(len(of_segment.trained) for of_segment in self.stepped)
        if 0 < stepped < trained:
            warnings.warn(
                f"The exception came while the optimizer was stepping in backward: {stepped} "
                f"weights have taken this step, {trained - stepped} have not. Continue from a "
                "checkpoint, or train with `overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check(self, optimizer: Optimizer, plan: Plan, why_not: str | None) -> None:
        """Check what the scope has vouched for, as the `step()` of an optimizer is called."""
        name = type(self.optimizer).__name__
        if optimizer is not self.optimizer:
            stepped = chain.from_iterable(of_segment.trained for of_segment in self.stepped)
            if not plan.gradients.keys().isdisjoint(stepped):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weights that another optimizer, "
                    f"{name}, has stepped in backward although its own `step()` was not called "
                    "yet. Train with `overlap_optimizer=False`."
                )
        elif why_not is not None:
            raise RuntimeError(
                f"Units were stepped in backward, but now {why_not}. Train with `overlap_optimizer=False`."
            )
        elif self._settings not in (None, settings_of(optimizer, self._steps.fused)):
            raise RuntimeError(
                f"{name} has stepped units in backward, and its param groups were changed after "
                "that, before `step()`. Set learning rates and the like before backward or after "
                "the step, or train with `overlap_optimizer=False`."
            )
