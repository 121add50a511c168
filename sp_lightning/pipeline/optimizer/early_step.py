"""Steps in backward: units are stepped before the optimizer's `step()` is called, as soon as gradients have landed.

A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
"""

from __future__ import annotations

import warnings
from itertools import chain

from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.segment_gradients import SegmentGradients
from sp_lightning.pipeline.optimizer.kinds import Plan, Step, parameters_of, settings_of
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps


class EarlyStep(Step):
    """A step of an optimizer that begins before its `step()` is called, with gradients as they come.

    A unit is stepped only if no node of the graph holds one of its weights on the device any more.

    Attributes:
        keeps_gradients: Whether gradients are kept after the step.
        stepped: The gradients that the step has used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        steps: UnitSteps,
        keeps_gradients: bool,
    ) -> None:
        super().__init__(optimizer, plan, steps.fused)
        self.keeps_gradients = keeps_gradients
        self.stepped: list[SegmentGradients] = []
        self._steps = steps
        self._had_state = set(optimizer.state)  # the parameters that have some before the step

    # ------------------------------------------------------------------------------------------------- in backward

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether these gradients, which are complete, are all of their unit, to be stepped right away."""
        unit = of_segment.unit
        # weights apart would have to wait for the step, and an alias must not show it before backward is over
        if unit.resident or unit.apart or unit.handles or unit.has_aliases:
            return False
        if unit.has_raw_readers and unit.calls_to_come:
            return False
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        gradients = of_segment.trained
        return trained == len(gradients) and self.plan.gradients.keys() >= set(gradients)

    def receive(self, of_segment: SegmentGradients) -> None:
        """Have a unit stepped, here or by the process that owns it, and let go of its gradients."""
        unit, steps = of_segment.unit, self._steps
        averages = steps.stream.averages
        if averages is not None:
            averages.pass_on(of_segment, steps.window.copies_of([unit]))
        if not unit.is_followed:  # else its step is counted
            self.use(of_segment.trained)
        steps.step(unit, self)
        if unit.visit is not None and steps.visits.begin_in_backward:
            unit.visit.begin(in_place=False)
        if unit in self.awaited and averages is None:
            steps.finish([unit])
        unit.is_ahead = averages is not None
        of_segment.consume()
        self.stepped.append(of_segment)
        if not self.keeps_gradients:
            steps.stream.consume(of_segment.trained)
        steps.window.stats.steps_in_backward += 1

    # -------------------------------------------------------------------------------------------------- after backward

    def acknowledge(self) -> None:
        """Take the units that were stepped for what they are: the optimizer's `step()` was called."""
        if self.awaited:
            # of other processes, for which backward could not wait
            self._steps.finish(self.awaited)
            state = self.optimizer.state
            for parameter in parameters_of(self.optimizer):
                if parameter in state and parameter not in self._had_state:
                    state[parameter] = state.pop(parameter)  # in the order in which torch makes it
        for of_segment in self.stepped:
            of_segment.unit.is_ahead = False
            of_segment.acknowledge_step()

    def abandon(self) -> None:
        """Give up after an error: `step()` will not be called. Warn if not all weights have been stepped."""
        for unit in self.plan.units:
            self._steps.count(unit, self.plan)
        self.acknowledge()
        trained = sum(gradient.weight.master.requires_grad for gradient in self.plan.gradients)
        stepped = sum(len(of_segment.trained) for of_segment in self.stepped)
        if 0 < stepped < trained:
            warnings.warn(
                f"superpipeline: the exception came while the optimizer was updating weights in backward: {stepped} "
                f"weights have taken this step, {trained - stepped} have not. Continue from a "
                "checkpoint, or train with `overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check(self, optimizer: Optimizer, plan: Plan, why_not: str | None) -> None:
        """Check what the scope has vouched for, as the `step()` of an optimizer is called."""
        why = None
        if optimizer is not self.optimizer:
            stepped = chain.from_iterable(of_segment.trained for of_segment in self.stepped)
            if not plan.gradients.keys().isdisjoint(stepped):
                why = f"{type(optimizer).__name__} is about to update some of their weights before `step()`"
        elif why_not is not None:
            why = why_not
        elif self.settings != settings_of(optimizer, self.fused):
            why = (
                "its param groups were changed before `step()`: set learning rates and the like "
                "before backward or after the step"
            )
        if why is not None:
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"{name} has updated units in backward, but now {why}. Train with `overlap_optimizer=False`."
            )
