"""Stepping the optimizer on the host while the device computes, with the numbers of a plain step.

The user's optimizer stays the owner of all state and settings. Weights that can be stepped unit by unit (update.py
tells) are taken out of its `param_groups` while its `step()` runs, so that torch's own code steps all others and
nothing else. Those taken out are then stepped unit by unit, on the thread for work on host memory.

[Note: when a unit is stepped]
*After backward*, by default: `step()` returns at once, and each unit is sent to the device when it is done. Everything
that decides about a step (clipping, a loss scaler, a user's hook that looks at gradients) has happened by then.
*In backward*, where somebody vouches that nothing of the kind will happen (early_steps.py).
Of the units that can be stepped, the one that the next forward needs first comes first. So when backward ends, the
units whose gradients came last are stepped first, and those whose gradients came first may wait until after the next
forward has begun. A unit with a `.grad` of the user's, who may change it, is stepped before `step()` returns.

[Note: nobody sees an unfinished step]
Masters are guarded (guard.py) for as long as a step is under way: whoever touches one waits for it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.scaling import NO_SCALING
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, State
from sp_lightning.pipeline.optimizer.early_steps import EarlyStep
from sp_lightning.pipeline.optimizer.group_steps import GroupSteps, Job, Plan
from sp_lightning.pipeline.optimizer.kinds import parameters_of, why_not_by_unit
from sp_lightning.pipeline.weights.units import Group
from sp_lightning.pipeline.weights.weight import Weight


class Overlap:
    """Decides what is stepped when, and gives it to the thread for work on host memory."""

    def __init__(
        self, weights: Mapping[int, Weight], steps: GroupSteps, stream: GradientStream, overlaps: bool
    ) -> None:
        self._weights = weights
        self._steps = steps
        self._stream = stream
        self._overlaps = overlaps
        # of this arrangement's groups: those of another one would hold memory for state that lies elsewhere by now
        self._plans: weakref.WeakKeyDictionary[Optimizer, Plan] = weakref.WeakKeyDictionary()
        self._taken_out: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._to_step: list[tuple[Group, list[Job], bool]] = []
        self._had_state: set[int] = set()
        self._awaiting: list[EarlyStep] = []  # `step()`
        self._is_closed = False

    # ------------------------------------------------------------------------------------- around an optimizer's step

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the weights that will be stepped unit by unit out of an optimizer that is about to step."""
        self.restore_param_groups()
        self._to_step.clear()  # left by a step that ended with an exception
        plan = self._plan_of(optimizer)
        if not plan.gradients:
            return
        why_not = self.why_not(optimizer)
        early = self._conclude_early(optimizer, plan, why_not)
        if why_not is not None:
            self._steps.settle()
            self._stream.show_all()
            return
        self._had_state = set(map(id, optimizer.state))
        self._choose(optimizer, plan)
        for step in early:
            self._finish_early(step)
        for param_group, others in zip(optimizer.param_groups, plan.others, strict=True):
            self._taken_out.append((param_group, param_group["params"]))
            param_group["params"] = others

    def _choose(self, optimizer: Optimizer, plan: Plan) -> None:
        """Choose what is stepped by unit.

        Without a gradient, as frozen weights are, there is nothing to step: torch would wait for the units to see that.
        """
        settings = self._steps.settings(optimizer)
        for group, steps in plan.steps.items():
            chosen: dict[Gradient, Tensor] = {}
            waits = not self._overlaps
            for step in steps:
                for gradient in step.gradients:
                    weight, tensor = gradient.weight, gradient.host
                    if gradient.unit.state is State.CONSUMED:
                        continue
                    if tensor is None:
                        tensor = weight.master.grad
                        if tensor is None:
                            continue
                        waits = True
                    weight.follow()
                    chosen[gradient] = tensor
            if chosen:
                jobs = self._steps.jobs(optimizer, steps, settings, chosen)
                self._to_step.append((group, jobs, waits))

    def after_step(self, optimizer: Optimizer) -> None:
        """Step the weights that were taken out of the optimizer, after it has stepped the others."""
        self.restore_param_groups()
        for group, jobs, _ in self._to_step:
            units = {g.unit for job in jobs for g in job.step.gradients}
            self._steps.begin(group, jobs, [unit.ticket for unit in units if unit.ticket is not None])
        makes_state = False
        for group, jobs, waits in self._to_step:
            # state made in a first step depends on settings of the process (torch's default dtype): wait for it
            if waits or any(job.makes_state for job in jobs):
                self._steps.finish(group)
                makes_state |= any(job.makes_state for job in jobs)
        self._to_step.clear()
        if makes_state:
            # in the order of the parameters, as torch's own code makes it, not in that of the units' steps
            for parameter in parameters_of(optimizer):
                if id(parameter) not in self._had_state and parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def keep_gradients(self, optimizer: Optimizer) -> None:
        """Keep gradients that a step has used. Those in their masters' dtypes were scaled in place."""
        for gradient in self._plan_of(optimizer).gradients:
            if gradient.host is not None and gradient.host.dtype == gradient.weight.dtype:
                gradient.scaling = NO_SCALING
            gradient.norm = None

    def drop_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the weights among these parameters without gradients, as a step has used them."""
        weights = (self._weights.get(id(parameter)) for parameter in parameters)
        self._stream.consume([self._stream.of(weight) for weight in weights if weight is not None])

    def close(self) -> None:
        """Leave all steps to the optimizers' own code: units are arranged anew, or by the next step if that fails."""
        self.restore_param_groups()
        self._plans.clear()
        self._is_closed = True

    def restore_param_groups(self) -> None:
        """Put everything that was taken out back into the param groups."""
        while self._taken_out:
            param_group, parameters = self._taken_out.pop()
            param_group["params"] = parameters

    def _plan_of(self, optimizer: Optimizer) -> Plan:
        plan = self._plans.get(optimizer)
        if plan is None or not plan.is_for(optimizer):
            if plan is not None:
                self._steps.settle()  # what the earlier plan has begun works on the same state
            plan = self._plans[optimizer] = Plan(optimizer, self._weights, self._stream)
        return plan

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Return why an optimizer cannot step weights unit by unit; None if it can."""
        if self._is_closed:
            return "units have yet to be arranged anew"
        return why_not_by_unit(optimizer)

    # ------------------------------------------------------------------------------------------------- in backward

    @contextmanager
    def stepping_in_backward(self, optimizer: Optimizer, clamp: float | None, keeps_gradients: bool) -> Iterator[None]:
        """Let an optimizer step units in the backward pass of this scope.

        Its `step()` must follow without a change of its settings, and nobody may ask for a gradient in between.

        Args:
            optimizer: The optimizer.
            clamp: Clip gradients to plus and minus this value.
            keeps_gradients: Whether gradients are kept after the step.
        """
        if not self._overlaps or self.why_not(optimizer) is not None:
            yield
            return
        early = EarlyStep(optimizer, self._plan_of(optimizer), self._steps, clamp, keeps_gradients)
        self._awaiting.append(early)
        self._stream.taker = early
        try:
            yield
        finally:
            self._stream.taker = None
            if not early.stepped:
                self._awaiting = [other for other in self._awaiting if other is not early]

    def _conclude_early(self, optimizer: Optimizer, plan: Plan, why_not: str | None) -> list[EarlyStep]:
        """Return the early steps of an optimizer whose `step()` was called, once the scope's promises were checked.

        Raises:
            RuntimeError: A promise was broken.
        """
        own = [step for step in self._awaiting if step.optimizer is optimizer]
        others = [step for step in self._awaiting if step.optimizer is not optimizer]
        for other in others:
            stepped = {gradient for unit in other.stepped for gradient in unit.trained}
            if not stepped.isdisjoint(plan.gradients):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weights that another optimizer, "
                    f"{type(other.optimizer).__name__}, has stepped in backward although its own `step()` was not "
                    "called yet. Train with `overlap_optimizer=False`."
                )
        if own and why_not is not None:
            raise RuntimeError(
                f"Units were stepped in backward, but now {why_not}. Train with `overlap_optimizer=False`."
            )
        for step in own:
            step.check_settings()
        self._awaiting = others
        return own

    def _finish_early(self, early: EarlyStep) -> None:
        for unit in early.stepped:
            unit.state = State.LANDED
            if not early.keeps_gradients:
                self._stream.consume(unit.trained)

    def abandon(self) -> None:
        """Finish the steps that were given to the thread, and begin no other, after an exception."""
        with contextlib.suppress(Exception):  # its error was raised already, or is due to the exception
            self._steps.settle()
        for early in self._awaiting:
            self._finish_early(early)
            stepped = {gradient for unit in early.stepped for gradient in unit.trained}
            left = sum(g.weight.master.requires_grad for g in early.plan.gradients) - len(stepped)
            if left > 0:
                warnings.warn(
                    f"The exception came while the optimizer was stepping in backward: {len(stepped)} weights "
                    f"have taken this step, {left} have not. Continue from a checkpoint, or train with "
                    "`overlap_optimizer=False`.",
                    stacklevel=2,
                )
        self._awaiting.clear()
        self._stream.taker = None

    @property
    def settled(self) -> bool:
        """Whether all masters are as they would be in plain training."""
        return self._steps.note_finished() and not self._awaiting
