"""Steps of groups on the thread for work on host memory: planned once per optimizer, handed over, waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.buffers import LandingBuffer
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import Gradient
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.optimizer.kinds import State, keeps_state, settings_of
from sp_lightning.pipeline.optimizer.unit_step import UnitStep
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.units import Group
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


class PlannedStep(NamedTuple):
    """The weights of one group that are in one param group.

    Attributes:
        param_group: The number of the param group.
        gradients: Their gradients.
        unit_step: What steps them.
    """

    param_group: int
    gradients: list[Gradient]
    unit_step: UnitStep


class Plan:
    """What is decided once for an optimizer, as long as its param groups have the same parameters.

    Attributes:
        gradients: The gradients of its weights, in the order of its parameters.
        others: For each param group, the parameters that are no weights of ours.
        steps: The steps of each group.
        strangers: For each of these groups, the gradients of weights that are not the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        self._parameters = [list(param_group["params"]) for param_group in optimizer.param_groups]
        self.gradients: list[Gradient] = []
        self.others: list[list[nn.Parameter]] = []
        found: dict[Group, dict[int, set[Gradient]]] = {}
        for index, parameters in enumerate(self._parameters):
            others: list[nn.Parameter] = []
            self.others.append(others)
            for parameter in parameters:
                weight = weights.get(id(parameter))
                if weight is None or isinstance(weight, QuantizedWeight):  # nobody trains these
                    others.append(parameter)
                    continue
                gradient = stream.of(weight)
                self.gradients.append(gradient)
                found.setdefault(weight.unit.group, {}).setdefault(index, set()).add(gradient)
        self.steps: dict[Group, list[PlannedStep]] = {}
        self.strangers: dict[Group, list[Gradient]] = {}
        for group in sorted(found, key=lambda group: (not group.resident, group.index)):
            in_order = list(zip(map(stream.of, group.weights), group.copies(), strict=True))
            known = set[Gradient]().union(*found[group].values())
            self.strangers[group] = [gradient for gradient, _ in in_order if gradient not in known]
            self.steps[group] = [
                PlannedStep(
                    index,
                    [gradient for gradient, _ in in_order if gradient in chosen],
                    UnitStep(
                        type(optimizer),
                        [gradient.weight.master for gradient, _ in in_order if gradient in chosen],
                        [gradient.weight.home for gradient, _ in in_order if gradient in chosen],
                        [copy for gradient, copy in in_order if gradient in chosen],
                    ),
                )
                for index, chosen in found[group].items()
            ]

    def is_for(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer has the parameters that this was decided for."""
        groups = optimizer.param_groups
        return len(groups) == len(self._parameters) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._parameters, strict=True)
        )


class Job(NamedTuple):
    """A planned step with what it works on.

    Attributes:
        step: The step.
        optimizer: The optimizer.
        settings: The param group without its parameters, as it was when the step was decided.
        scaling: Unscaling and clipping, applied to the gradients first.
        gradients: The gradients; None for weights that stay as they are.
        states: The optimizer's state of each weight.
        makes_state: Whether the step makes state of one of them.
    """

    step: PlannedStep
    optimizer: Optimizer
    settings: dict[str, Any]
    scaling: Scaling
    gradients: list[Tensor | None]
    states: list[State]
    makes_state: bool


class GroupSteps:
    """Gives steps to the thread, and knows which are under way.

    Attributes:
        stream: Brings gradients.
        stats: Counters.
    """

    def __init__(self, window: Window, backend: Backend, stream: GradientStream, stats: Stats, fused: bool) -> None:
        self.stream = stream
        self.stats = stats
        self._window = window
        self._backend = backend
        self._fused = fused
        self._under_way: list[Group] = []

    def settings(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return a copy of each param group as it is now, without its parameters."""
        return [settings_of(param_group, optimizer, self._fused) for param_group in optimizer.param_groups]

    def jobs(
        self,
        optimizer: Optimizer,
        steps: Sequence[PlannedStep],
        settings: Sequence[dict[str, Any]],
        gradients: Mapping[Gradient, Tensor],
        scaling: Scaling | None = None,
    ) -> list[Job]:
        """Return the jobs of a group's step.

        State is looked up at once: `optimizer.state` may be cleared or replaced before the thread begins.

        Args:
            optimizer: The optimizer.
            steps: What is planned for the group.
            settings: The param groups without their parameters.
            gradients: The gradients to step with.
            scaling: The scaling of all of them; by default what is recorded for each.
        """
        jobs = []
        for step in steps:
            chosen = settings[step.param_group]
            states, makes_state = self._states(optimizer, step, chosen, gradients)
            if scaling is None:
                scalings = {id(g.scaling): g.scaling for g in step.gradients if g in gradients}
            else:
                scalings = {id(scaling): scaling}
            for each in scalings.values():
                own = [gradients.get(g) if scaling is not None or g.scaling is each else None for g in step.gradients]
                jobs.append(Job(step, optimizer, chosen, each, own, states, makes_state))
        return jobs

    def _states(
        self, optimizer: Optimizer, step: PlannedStep, settings: dict[str, Any], gradients: Mapping[Gradient, Tensor]
    ) -> tuple[list[State], bool]:
        state, states, makes_state = optimizer.state, [], False
        keeps = keeps_state(optimizer, settings)
        for gradient in step.gradients:
            found = state.get(gradient.weight.master)
            if found is None:
                found = {}
                if keeps and gradient in gradients:
                    state[gradient.weight.master] = found
            makes_state |= keeps and not found and gradient in gradients
            states.append(found)
        return states, makes_state

    def begin(
        self,
        group: Group,
        jobs: Sequence[Job],
        after: Sequence[Ticket],
        buffers: Sequence[LandingBuffer | None] = (),
    ) -> None:
        """Have the thread step a group.

        Args:
            group: The group.
            jobs: What to step with what.
            after: Tickets that the step has to wait for.
            buffers: Landing buffers that gradients lie in, which are released after the step.
        """
        self._window.finish_optimizer(group)
        pairs = [pair for job in jobs for pair in zip(job.step.gradients, job.gradients, strict=True)]
        stepped = {gradient.weight for gradient, tensor in pairs if tensor is not None}

        def step() -> None:
            with torch.inference_mode(False), torch.no_grad(), without_torch_function():
                group.refresh_other_copies(stepped)
                for job in jobs:
                    job.step.unit_step.run(job.optimizer, job.settings, job.scaling, job.gradients, job.states)
                group.note_stepped()

        def release_buffers() -> None:
            for buffer in buffers:
                if buffer is not None:
                    buffer.release()

        self._window.outdate(group, stepped)
        copies = self._window.copies_of(group)
        moved = sum(2 * weight.nbytes for weight in stepped)
        moved += sum(tensor.nbytes for _, tensor in pairs if tensor is not None)
        rank = 0 if group.resident else group.index + 1
        group.being_stepped = self._backend.work(step, [*copies, *after], moved, release_buffers, rank=rank)
        self._backend.trace.moved(Kind.STEP, group.name, moved, group.being_stepped)
        self._under_way.append(group)
        self.stats.overlapped_steps += group.unit_count
        if group.apart:
            # weights made resident are in groups that do not wait for this one's step
            self.finish(group)

    def finish(self, group: Group) -> None:
        """Wait until no step reads or writes the memory of a group any more.

        Raises:
            Exception: The first error of a step. All other steps have ended by then, and their errors are dropped: they
                mostly have the same cause.
        """
        try:
            self._window.finish_optimizer(group)
        except Exception:
            with suppress(Exception):
                self.settle()
            raise

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them.

        Raises:
            Exception: The first error of a step.
        """
        errors = []
        while self._under_way:
            try:
                self._window.finish_optimizer(self._under_way[0])
            except Exception as error:
                errors.append(error)
            self._under_way.pop(0)  # not if an interrupt has ended the wait
        self._window.settle()
        if errors:
            raise errors[0]

    def note_finished(self) -> bool:
        """Note which steps are over, and tell whether none is under way any more; does not wait."""
        for group in self._under_way:
            if group.being_stepped is not None and group.being_stepped.done:
                self.finish(group)
        self._under_way = [group for group in self._under_way if group.being_stepped is not None]
        return not self._under_way
