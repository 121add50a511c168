"""Steps in backward: units are stepped before the optimizer's `step()` is called, as soon as gradients have landed.

A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain

from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.routes import Shipment
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, Scaling, SegmentGradients, drop
from sp_lightning.pipeline.optimizer.kinds import Plan, Step, Used, makes_state, settings_of
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
        # with settings as they are when the first unit is stepped: hooks before backward may change them
        self._step: Step | None = None
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
            self._step_unit(unit)

    def receive_averaged(self, shipments: Iterable[Shipment]) -> None:
        """Receive gradients whose averages over processes are on their way, of segments that have all of them."""
        for shipment in shipments:
            of_segment = shipment.of_segment
            if len(shipment.gradients) == len(of_segment.trained) and self.wants(of_segment):
                self.receive(shipment)

    def end_unit(self) -> None:
        """Step the unit whose gradients came last, as backward has left it, or give them back if it is needed."""
        if not self._shipments:
            return
        unit = self._shipments[0].of_segment.unit
        if self._is_complete(unit):
            self._step_unit(unit)
            return
        for shipment in self._shipments:
            self._steps.stream.take_back(shipment)
        self._shipments = []

    def _is_complete(self, unit: Unit) -> bool:
        """Tell whether all trained weights of a unit have their gradients, and no node holds a weight any more."""
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        arrived = sum(len(shipment.gradients) for shipment in self._shipments)
        return not unit.handles and arrived == trained

    def _step_unit(self, unit: Unit) -> None:
        """Have a unit stepped, here or by the process that owns it, and let go of its gradients."""
        steps = self._steps
        step = self._step
        if step is None:
            settings = settings_of(self.optimizer, steps.fused)
            step = self._step = Step(self.optimizer, self.plan, settings)
        shipments = self._shipments
        self._shipments = []
        copies = steps.window.copies_of([unit])
        averages = steps.stream.averages
        awaits_others = averages is not None
        for shipment in shipments:
            for gradient in shipment.gradients:
                gradient.scaling = self._scaling
            if averages is not None:
                averages.pass_on(shipment.of_segment, copies)
        if unit.is_followed:
            steps.count(unit, self.plan)
        elif self._hand_over(unit, step, shipments) and not awaits_others:
            # how state is made depends on torch's default dtype, which may change
            steps.finish([unit])
        unit.is_ahead = awaits_others
        for shipment in shipments:
            shipment.of_segment.consume()
            self.stepped.append(shipment.of_segment)
            if not self.keeps_gradients:
                drop(shipment.gradients)
        steps.window.stats.steps_in_backward += 1

    def _hand_over(self, unit: Unit, step: Step, shipments: Sequence[Shipment]) -> bool:
        """Hand a unit's step over, and tell whether it makes state."""
        used: dict[Gradient, Used] = {}
        for shipment in shipments:
            for gradient, tensor in zip(shipment.gradients, shipment.tensors, strict=True):
                used[gradient] = tensor, self.optimizer.state.get(gradient.weight.master, {})
        buffers = [shipment.buffer for shipment in shipments if shipment.buffer is not None]
        self._steps.step(unit, step, used, buffers)
        if unit.visit is not None:
            unit.visit.begin()
        return not used.keys().isdisjoint(self._new)

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
        elif self._step is not None and self._step.settings != settings_of(optimizer, self._steps.fused):
            raise RuntimeError(
                f"{name} has stepped units in backward, and its param groups were changed after "
                "that, before `step()`. Set learning rates and the like before backward or after "
                "the step, or train with `overlap_optimizer=False`."
            )
