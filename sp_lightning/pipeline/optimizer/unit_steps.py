"""Steps of units on the thread for work on host memory: planned once per optimizer, handed over, waited for.

They are handed over when `step()` is called, or while backward runs (early_step.py). A unit whose weights and state are
on the device would have a stepper of its own beside this one, with the same few verbs.

[Note: one pass]
A step reads and writes host memory as few times as can be:

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)

For torch's fused AdamW, Adam and SGD this is one pass of a compiled kernel (`sp_lightning.optim`). Otherwise the code
of the user's optimizer makes a pass for each operation. All bits are as after `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim.of_torch import OnePass, scaling_of
from sp_lightning.optim.passes import Work
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, LandingBuffer
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.optimizer.kinds import Plan, Step, Used
from sp_lightning.pipeline.optimizer.pieces import lay_together
from sp_lightning.pipeline.optimizer.visit import Visit, Visits, note_stepped
from sp_lightning.pipeline.processes.box import SharedMemory
from sp_lightning.pipeline.torch_private import code_of_step, without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window

# Elements of a weight whose gradient is cast and scaled by itself: smaller ones together, or Python's time would show.
_ALONE = 1 << 16

Update: TypeAlias = tuple[Work, Sequence[Tensor]]
"""What is to be done for a weight, and the factors that unscale and clip its gradient before the update."""


class _Generation(NamedTuple):
    """What masters in shared memory will be when a step is done."""

    memory: SharedMemory
    number: int


@dataclass(eq=False)
class _StepOfUnit:
    """A job: a step of one unit's weights."""

    unit: Unit
    optimizer: Optimizer
    settings: Sequence[dict[str, Any]]
    updates: Mapping[int, Sequence[Update]]  # by the numbers of param groups
    weights: Set[Weight]  # those that are stepped
    generations: Sequence[_Generation]
    buffers: Sequence[LandingBuffer | None]  # that their gradients lie in

    def __call__(self) -> None:
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            for segment in self.unit.segments:
                segment.refresh_copies(self.weights)
            for number, updates in self.updates.items():
                update_weights(self.optimizer, self.settings[number], updates)
            note_stepped(self.unit.segments, self.weights)
            for generation in self.generations:
                generation.memory.reach(generation.number)
            if self.unit.visits:  # from the next step on, for which state may be new
                lay_together(self.unit, self.optimizer)

    def release_buffers(self) -> None:
        """Let other gradients land in the buffers."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer.release()


class UnitSteps:
    """Gives steps of units to the thread, and waits for them."""

    def __init__(self, window: Window, stream: GradientStream, visits: Visits) -> None:
        self.window = window
        self.stream = stream
        self.visits = visits
        # whether to take torch's fused kernels where the user left the choice to torch; as in plain training on the CPU
        self.fused = window.backend.device.type != "cpu"

    def step(self, unit: Unit, step: Step) -> None:
        """Have the thread step a unit when its gradients have landed, and then release the buffers that they lie in.

        Weights without a gradient stay as they are.
        """
        gradients = [self.stream.of[weight] for weight in unit.weights]
        used = {each: step.used[each] for each in gradients if each in step.used}
        if unit.visits:
            visit = self._visit_of(unit, step, used)
            if visit is not None:
                self._hand_over_visit(unit, visit)
                return
            used = self._brought_home(used)
        updates: dict[int, list[Update]] = {}
        landed: dict[Ticket | None, None] = {}  # what brings the gradients
        buffers: list[LandingBuffer | None] = []
        moved = 0
        for of_segment in dict.fromkeys([gradient.of_segment for gradient in used]):
            landed[of_segment.ticket] = None
            buffers.append(of_segment.pass_landing())
            for gradient, copy in zip(of_segment.gradients, of_segment.segment.copies, strict=True):
                if gradient in used:
                    weight = gradient.weight
                    tensor, state = used[gradient]
                    work = Work(weight.master.data, tensor, state, copy)
                    of_group = updates.setdefault(step.plan.gradients[gradient], [])
                    of_group.append((work, gradient.factors))
                    moved += 2 * weight.home.nbytes + tensor.nbytes
        if not used:
            self.count(unit, step.plan)
            return
        weights = {gradient.weight for gradient in used}
        generations = self._next_generations(unit, step.plan)
        optimizer, settings = step.optimizer, step.settings
        job = _StepOfUnit(unit, optimizer, settings, updates, weights, generations, buffers)
        self._hand_over(unit, job, weights, filter(None, landed), moved, job.release_buffers)
        self.window.stats.overlapped_steps += 1

    def _visit_of(self, unit: Unit, step: Step, used: Mapping[Gradient, Used]) -> Visit | None:
        """Return a visit of the unit that makes this step; None if it has to be made on the host."""
        of_segments = {gradient.of_segment for gradient in used}
        if len(of_segments) != 1:
            return None
        (of_segment,) = of_segments
        self.window.finish_optimizer(unit)  # or state might be laid elsewhere under an earlier step
        copies = self.window.copies_of([unit])
        return self.visits.visit_of(unit, step, of_segment, used, copies)

    def _brought_home(self, used: Mapping[Gradient, Used]) -> dict[Gradient, Used]:
        """Have gradients that have stayed on the device land, and return all as they lie on the host."""
        home: dict[Gradient, Used] = {}
        for gradient, (tensor, state) in used.items():
            if gradient.of_segment.is_on_device:
                self.stream.routes.bring_home(gradient.of_segment)
            home[gradient] = tensor if gradient.tensor is None else gradient.tensor, state
        return home

    def _hand_over_visit(self, unit: Unit, visit: Visit) -> None:
        window = self.window
        window.outdate(unit, visit.weights)
        unit.being_stepped = unit.visit = visit
        window.stats.visits += 1
        window.stats.overlapped_steps += 1
        if unit.apart:
            window.finish_optimizer(unit)

    def _hand_over(
        self,
        unit: Unit,
        job: Callable[[], None],
        weights: Set[Weight],
        after: Iterable[Ticket],
        moved: int = 0,
        cleanup: Callable[[], None] | None = None,
    ) -> None:
        window = self.window
        window.finish_optimizer(unit)
        window.outdate(unit, weights)
        rank = 0 if unit.resident else unit.index + 1  # first what the next forward needs first
        after = [*window.copies_of([unit]), *after]
        trace = window.backend.trace
        unit.being_stepped = trace.work(Kind.STEP, unit.name, job, after, moved, cleanup, rank)
        if unit.apart:  # weights made resident are in units that do not wait for this one's step
            window.finish_optimizer(unit)

    def count(self, unit: Unit, plan: Plan) -> None:
        """Count a step that changes no weight of a unit here; the thread waits for the process that steps them."""
        generations = self._next_generations(unit, plan)
        if generations and unit.is_followed:
            weights = {weight for weight in unit.weights if self.stream.of[weight] in plan.gradients}
            stepped = [generation.memory.reached(generation.number) for generation in generations]
            self._hand_over(unit, partial(note_stepped, unit.segments, weights), weights, stepped)
        elif generations:
            self.window.finish_optimizer(unit)
            for segment in unit.segments:  # the optimizer's own code may have stepped them
                segment.check()
                segment.refresh_copies()
            for generation in generations:
                generation.memory.reach(generation.number)

    def _next_generations(self, unit: Unit, plan: Plan) -> list[_Generation]:
        """Count a step of weights that other processes have, too, whether or not it changes them; once."""
        generations: list[_Generation] = []
        if unit.is_ahead:
            return generations
        for segment in unit.segments:
            memory = segment.memory.shared
            if memory is None:
                continue
            if any(self.stream.of[weight] in plan.gradients for weight in segment.weights):
                memory.generation += 1
                generations.append(_Generation(memory, memory.generation))
        return generations

    def finish(self, units: Iterable[Unit]) -> None:
        """Wait until no step reads or writes the memory of these units any more.

        Raises:
            Exception: The first error of a step, when all have ended; the others mostly have the same cause.
        """
        errors = []
        for unit in units:
            try:
                self.window.finish_optimizer(unit)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them."""
        try:
            self.finish(self.window.units)
        finally:
            self.window.finish_copies(self.window.units)


# ---------------------------------------------------------------------------- what a step does with a unit's weights


def update_weights(optimizer: Optimizer, settings: dict[str, Any], updates: Sequence[Update]) -> None:
    """Update masters and state as `optimizer.step()` would with these settings of a param group, and copies.

    The caller turns gradients, inference mode and overrides of torch functions off.
    """
    code = code_of_step(optimizer, settings.copy())
    together: list[Update] = []
    one_pass = OnePass(optimizer, settings)
    works: list[Work] = []
    for work, factors in updates:
        work = work._replace(scaling=scaling_of(factors))
        if one_pass.takes(work):
            works.append(work)
        elif work.weight.numel() < _ALONE:
            together.append((work, factors))
        else:
            _update(code, [(work, factors)])
    # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
    for is_first in (False, True):
        _update(code, [update for update in together if is_first is not _has_state(update)])
    if works:
        one_pass.step(works)


def _has_state(update: Update) -> bool:
    work, _ = update
    return any(value is not None for value in work.state.values())


def _update(code: Callable[..., None], updates: Sequence[Update]) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies."""
    for work, factors in updates:
        weight, gradient = work.weight, work.gradient
        assert gradient is not None
        factors = [factor for factor in factors if factor != 1]
        if factors or gradient.dtype != weight.dtype:
            gradient = torch.empty_like(gradient, dtype=weight.dtype).copy_(gradient)
            for factor in factors:
                gradient.mul_(factor)
        weight.grad = gradient
    if updates:
        code({work.weight: work.state for work, _ in updates})
    for work, _ in updates:
        if work.copy is not None:
            work.copy.copy_(work.weight)
