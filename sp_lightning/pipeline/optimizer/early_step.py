"""Steps in backward: units are updated before the optimizer's `step()` is called, as soon as gradients have landed.

A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and no code looks at gradients in between. Code that does gets an error.
"""

from __future__ import annotations

import warnings
from itertools import chain

from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.segment_gradients import SegmentGradients
from sp_lightning.pipeline.optimizer.kinds import OptimizerWeights, Step, parameters_of, settings_of
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps


class EarlyStep(Step):
    """A step of an optimizer that updates units in backward, before its `step()` is called.

    A unit is updated only if no node of the graph holds one of its weights on the device any more.

    Attributes:
        keeps_gradients: Whether gradients are kept after the step.
        stepped: The gradients that the step has used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_weights: OptimizerWeights,
        steps: UnitSteps,
        keeps_gradients: bool,
    ) -> None:
        super().__init__(optimizer, optimizer_weights, steps.fused)
        self.keeps_gradients = keeps_gradients
        self.stepped: list[SegmentGradients] = []
        self._steps = steps
        self._had_state = set(optimizer.state)  # the parameters that had state before the step

    # ------------------------------------------------------------------------------------------------- in backward

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether these complete gradients are all of their unit's, so that it can be updated right away."""
        unit = of_segment.unit
        # Split-off weights would have to wait for the step. An alias must not show the step before backward is over.
        readers = unit.readers
        if unit.resident or unit.split_off or readers.handles or readers.has_aliases:
            return False
        if readers.has_raw_readers and readers.calls_to_come:
            return False
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        gradients = of_segment.trained
        return trained == len(gradients) and self.optimizer_weights.gradients.keys() >= set(gradients)

    def step_with(self, of_segment: SegmentGradients) -> None:
        """Step a unit with its gradients, here or in the process that owns it, and drop these unless they are kept."""
        unit, steps = of_segment.unit, self._steps
        averages = steps.stream.averages
        if averages is not None:
            averages.pass_on(of_segment, steps.window.copies_of([unit]))
        if not unit.is_followed:  # otherwise the process that owns the unit collects them
            self.collect_gradients(of_segment.trained)
        steps.step(unit, self)
        if unit.update.to_begin is not None and steps.visits.begin_in_backward:
            unit.update.to_begin.begin(in_place=False)
        if unit in self.awaited and averages is None:
            steps.finish([unit])
        unit.update.is_ahead = averages is not None
        of_segment.consume()
        self.stepped.append(of_segment)
        if not self.keeps_gradients:
            steps.stream.consume(of_segment.trained)
        steps.window.stats.steps_in_backward += 1

    # -------------------------------------------------------------------------------------------------- after backward

    def acknowledge(self) -> None:
        """Acknowledge the units that were stepped: the optimizer's `step()` was called."""
        if self.awaited:
            # These steps need other processes, for which backward could not wait.
            self._steps.finish(self.awaited)
            state = self.optimizer.state
            for parameter in parameters_of(self.optimizer):
                if parameter in state and parameter not in self._had_state:
                    state[parameter] = state.pop(parameter)  # torch makes state in the order of parameters
        for of_segment in self.stepped:
            of_segment.unit.update.is_ahead = False
            of_segment.acknowledge_step()

    def abandon(self) -> None:
        """Give up after an error: `step()` will not be called. Warn if not all weights have been stepped."""
        self.acknowledge()
        trained = sum(weight.master.requires_grad for weight in self.optimizer_weights.weights)
        stepped = sum(len(of_segment.trained) for of_segment in self.stepped)
        if 0 < stepped < trained:
            warnings.warn(
                f"superpipeline: the exception came while the optimizer was updating weights in backward: {stepped} "
                f"weights have taken this step, {trained - stepped} have not. Continue from a "
                "checkpoint, or train with `overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check_promises(
        self,
        optimizer: Optimizer,
        optimizer_weights: OptimizerWeights,
        why_not: str | None,
    ) -> None:
        """Raise if the scope's promises are broken when an optimizer's `step()` is called.

        `why_not` is the reason why units cannot be stepped one by one now; None if they can.
        """
        broken_promise = None
        if optimizer is not self.optimizer:
            stepped = chain.from_iterable(of_segment.trained for of_segment in self.stepped)
            if not optimizer_weights.gradients.keys().isdisjoint(stepped):
                broken_promise = f"{type(optimizer).__name__} is about to update some of their weights before `step()`"
        elif why_not is not None:
            broken_promise = why_not
        elif self.settings != settings_of(optimizer, self.fused):
            broken_promise = (
                "its param groups were changed before `step()`: set learning rates and the like "
                "before backward or after the step"
            )
        if broken_promise is not None:
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"{name} has updated units in backward, but now {broken_promise}. Train with `overlap_optimizer=False`."
            )
